"""Relabelling: the policy drives, the expert's opinion is the label, and nothing depends on the batch."""

from __future__ import annotations

import numpy as np
import pytest

from vola.envs.experts import LEFT, RIGHT, Expert
from vola.envs.tabletop import make_tabletop
from vola.errors import ConfigError, InputError
from vola.executor import Receding
from vola.rollout.collect import demonstrate
from vola.rollout.dagger import Relabelled, relabel
from vola.rollout.rollout import rollout
from vola.rollout.samples import fan
from vola.types import Chunk, Observation

SEEDS = [11, 5, 8, 23]


class Steady:
    """Drives in one direction, with a little noise of its own."""

    observation_window = 1

    def __init__(self, way: tuple[float, float], H: int = 4) -> None:
        self.way, self.chunk_length = way, H

    def plan(self, observation: Observation, rngs: list[np.random.Generator]) -> Chunk:
        noise = np.stack([g.standard_normal((self.chunk_length, 2)) for g in rngs])
        actions = (np.array(self.way) + 0.002 * noise).astype(np.float32)
        return Chunk(actions, np.ones(actions.shape[:2], bool))


def drive(way: tuple[float, float], seeds: list[int] | range = SEEDS, env: str = "vola/Detour-v0", **options: object):
    settings = {k: options.pop(k) for k in ("noise", "actions") if k in options}
    table = make_tabletop(env, image_size=8, **settings)
    return list(relabel(table, seeds, Steady(way), Receding(3), **options))


def test_a_failed_episode_is_kept_up_to_its_end() -> None:
    made = drive((0.0, 0.1))
    assert [r.demonstration.seed for r in made] == SEEDS
    table = make_tabletop("vola/Detour-v0", image_size=8)
    known = rollout(table, SEEDS, Steady((0.0, 0.1)), Receding(3), name="", role="policy", task="")
    for r, episode in zip(made, known.episodes, strict=True):
        d = r.demonstration
        assert (r.success, r.failure) == (episode.success, episode.failure) == (False, "collision")
        assert len(d.state) == len(d.action) == len(d.images["top"]) == len(r.by_expert) == episode.length
        assert d.instruction == episode.instruction
        assert not r.by_expert.any()


@pytest.mark.parametrize("env", ["vola/Push-v0", "vola/Compose-v0", "vola/Insert-v0", "vola/Chase-v0"])
def test_the_label_is_what_the_expert_would_do_at_the_visited_state(env: str) -> None:
    (made,) = drive((0.03, 0.01), [4], env, noise=0.2)
    d = made.demonstration
    table = make_tabletop(env, image_size=8, noise=0.2)
    table.reset([4])
    planner, rng = Steady((0.03, 0.01)), [np.random.default_rng([0, 4])]
    for t in range(len(d.state)):
        if t % 3 == 0:
            chunk = planner.plan(table.observe(), rng).actions[0]
        np.testing.assert_array_equal(d.state[t], table.state[0])
        np.testing.assert_array_equal(d.images["top"][t], table.render()[0])
        np.testing.assert_array_equal(d.action[t], Expert(table).act()[0].astype(np.float32))
        table.step(chunk[None, t % 3])
    assert table.done.all()


def test_episodes_do_not_depend_on_the_batch() -> None:
    together = drive((0.05, 0.05), noise=0.3, beta=0.4)
    for seed, one in zip(SEEDS, together, strict=True):
        (alone,) = drive((0.05, 0.05), [seed], noise=0.3, beta=0.4)
        for name in ("state", "action"):
            np.testing.assert_array_equal(getattr(alone.demonstration, name), getattr(one.demonstration, name))
        np.testing.assert_array_equal(alone.by_expert, one.by_expert)


def test_beta_is_the_share_of_the_steps_that_the_expert_drives() -> None:
    made = drive((0.0, -0.1), range(40), beta=0.5)
    share = np.concatenate([r.by_expert for r in made])
    assert share.mean() == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(len(share)))
    # With beta = 1 these are the expert's own demonstrations of the nearer side.
    table = make_tabletop("vola/Detour-v0", image_size=8)
    made, shown = drive((0.0, -0.1), range(10), beta=1.0), demonstrate(table.config, 10, sides="near")
    for r, d in zip(made, shown, strict=True):
        assert r.success
        assert r.by_expert.all()
        np.testing.assert_array_equal(r.demonstration.state, d.state)
        np.testing.assert_array_equal(r.demonstration.action, d.action)
        np.testing.assert_array_equal(r.demonstration.images["top"], d.images["top"])


def sides(made: list[Relabelled]) -> list[np.ndarray]:
    return [np.sign(r.demonstration.action[:3, 0]) for r in made]


def test_the_expert_names_the_side_the_robot_is_on() -> None:
    table = make_tabletop("vola/Detour-v0")
    table.reset(SEEDS)
    middle = table.world.wall[:, 0]
    for way, side in (((-0.1, 0.0), LEFT), ((0.1, 0.0), RIGHT)):
        for r, x in zip(drive(way, SEEDS), middle, strict=True):
            d = r.demonstration
            beyond = side * (d.state[:, 0] - x)
            going = (beyond > 0.11) & (beyond < 0.4) & (d.state[:, 1] < -0.2)
            assert going.any()
            assert (np.sign(d.action[going, 0]) == side).all()


def test_labels_do_not_flicker_about_the_middle() -> None:
    """Up and down in the middle with noise that crosses it: every episode names one side at the start and keeps it."""
    crossed = 0
    for r in drive((0.0, -0.05), range(40), noise=0.3):
        d = r.demonstration
        table = make_tabletop("vola/Detour-v0")
        table.reset([d.seed])
        aside = d.state[:, 0] - table.world.wall[0, 0]
        inside = np.cumsum(np.abs(aside) > 0.1) == 0  # before it is clearly on a side for the first time
        assert len(set(np.sign(d.action[inside, 0]))) <= 1
        crossed += len(set(np.sign(aside[inside]))) > 1
    assert crossed > 3


def test_demonstrations_of_positions_and_their_fan() -> None:
    table = make_tabletop("vola/Insert-v0", image_size=8, noise=0.1)
    for d in demonstrate(table.config, 5):
        way = d.action - d.state
        assert np.linalg.norm(way, axis=1).max() <= 0.12 + 1e-6
        assert np.abs(d.action[:-1] - d.state[1:]).max() < 0.06  # it goes where the action says
    made = fan(Steady((0.3, 0.4)), table, seed=4, n=3)
    start = table.world.robot[0]
    np.testing.assert_allclose(made.paths[:, 0], np.tile([start[0] + 1, 1 - start[1]], (3, 1)) * 128, rtol=1e-5)
    np.testing.assert_allclose(made.paths[:, 1:], np.full((3, 4, 2), (1.3 * 128, 0.6 * 128)), atol=1.5)


def test_misuse_is_refused() -> None:
    with pytest.raises(ConfigError, match="beta"):
        drive((0.0, 0.1), beta=1.5)
    with pytest.raises(InputError, match="at least one seed"):
        drive((0.0, 0.1), [])
