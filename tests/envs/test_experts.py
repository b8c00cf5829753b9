"""Experts succeed always, on the side they were told, and plan like any policy."""

import numpy as np
import pytest

from vola.envs.experts import LEFT, RIGHT, Expert, scene_requests
from vola.envs.tabletop import TASKS, make_tabletop
from vola.errors import ConfigError, InputError


def run(table, sides=None):
    """Play to the end; returns the robots' way, ``steps n 2``."""
    expert, way = Expert(table, sides), [table.state[:, :2]]
    while not table.done.all():
        way.append(table.step(expert.act()).state[:, :2])
    return np.stack(way)


@pytest.mark.parametrize("env_id", TASKS)
def test_expert_succeeds_always(env_id):
    table = make_tabletop(env_id)
    seeds, sides = scene_requests(table.config, 600, first_seed=1000)
    table.reset(seeds)
    run(table, sides)
    assert table.success.all()
    assert table.steps.mean() < 0.55 * table.config.task.time_limit or table.config.task.judged_at_end


@pytest.mark.parametrize(("env_id", "noise"), [("vola/Detour-v0", 0.15), ("vola/Push-v0", 0.3)])
def test_expert_corrects_the_noise_of_demonstrations(env_id, noise):
    kicks = 0.03 if env_id == "vola/Push-v0" else 0.0
    table = make_tabletop(env_id, noise=noise, kick_probability=kicks)
    seeds, sides = scene_requests(table.config, 1000, first_seed=0)
    table.reset(seeds)
    run(table, sides)
    assert table.success.mean() >= 0.998


def test_expert_masters_other_geometries():
    for settings in ({"wall_half_width": 0.35}, {"wall_half_width": 0.2, "speed": 0.08, "start_x": 0.3}):
        table = make_tabletop("vola/Detour-v0", **settings)
        seeds, sides = scene_requests(table.config, 300, first_seed=0)
        table.reset(seeds)
        run(table, sides)
        assert table.success.all()


def test_demonstrations_are_paired_and_pass_on_the_side_they_were_told():
    table = make_tabletop("vola/Detour-v0")
    seeds, sides = scene_requests(table.config, 100, first_seed=7)
    assert seeds.tolist() == [7 + i // 2 for i in range(100)]
    assert sides.tolist() == [LEFT, RIGHT] * 50
    table.reset(seeds)
    way = run(table, sides)
    wall = table.world.wall
    beside = np.abs(way[..., 1] - wall[:, 1]) < 0.15
    for i in range(100):
        assert (np.sign(way[beside[:, i], i, 0] - wall[i, 0]) == sides[i]).all()


def test_the_nearer_side_is_that_of_the_start():
    table = make_tabletop("vola/Detour-v0")
    seeds, sides = scene_requests(table.config, 50, first_seed=0, sides="near")
    assert len(set(seeds)) == 50
    table.reset(seeds)
    start = table.state[:, 0].copy()
    way = run(table, sides)
    second = way[2, :, 0]
    assert (np.sign(second - start) == np.sign(start - table.world.wall[:, 0])).all()


def test_the_average_of_both_ways_hits_the_wall():
    """What a regression head learns from paired demonstrations: the mean of two good chunks is a bad one."""
    table = make_tabletop("vola/Detour-v0")
    chunks = {}
    for side in (LEFT, RIGHT):
        table.reset(np.arange(200))
        expert, actions = Expert(table, np.full(200, side)), []
        for _ in range(8):
            actions.append(expert.act())
            table.step(actions[-1])
        chunks[side] = actions
    table.reset(np.arange(200))
    for left, right in zip(chunks[LEFT], chunks[RIGHT], strict=True):
        result = table.step((left + right) / 2)
    assert (result.failure == "collision").mean() > 0.98


def test_expert_is_a_planner():
    table = make_tabletop("vola/Push-v0")
    table.reset([1, 2, 3])
    expert = Expert(table)
    chunk = expert.plan(table.observe(), [np.random.default_rng(i) for i in range(3)])
    chunk.check(table.spec.action, expert.chunk_length)
    np.testing.assert_allclose(chunk.actions[:, 0], expert.act(), rtol=1e-6)
    assert (np.linalg.norm(chunk.actions[:, 0], axis=1) <= table.config.task.speed * (1 + 1e-6)).all()
    observation = table.observe()
    table.reset([1, 2])
    with pytest.raises(InputError, match="all 2 scenes"):
        expert.plan(observation, ())


def test_requests_and_sides_are_checked():
    config = make_tabletop("vola/Detour-v0").config
    with pytest.raises(ConfigError, match="even"):
        scene_requests(config, 5, 0)
    with pytest.raises(ConfigError, match="at least 1"):
        scene_requests(config, 0, 0)
    assert scene_requests(config, 3, 4, "left")[1].tolist() == [LEFT] * 3
    seeds, sides = scene_requests(make_tabletop("vola/Push-v0").config, 3, 4)
    assert (seeds.tolist(), sides.tolist()) == ([4, 5, 6], [0, 0, 0])
    table = make_tabletop("vola/Detour-v0")
    table.reset([0, 1])
    with pytest.raises(InputError, match="-1"):
        Expert(table, [2, 0])
    with pytest.raises(InputError, match="one per scene"):
        Expert(table, [1]).act()
