"""Plans that arrive late: which step is executed when, what is counted, and that no scene depends on another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vola.ensemble import Ensemble
from vola.errors import ConfigError, DataError
from vola.executor import Executor, Receding
from vola.realtime import RealTime
from vola.report.records import read_rollouts
from vola.rollout import rollout as rollout_module
from vola.rollout.latency import Latency
from vola.rollout.rollout import Rollouts, rollout
from vola.types import ActionSpec, Chunk, Guide, Observation, RobotSpec, StateSpec

H = 8
SPEC = RobotSpec((), StateSpec(("tick", "scene"), ("", "")), ActionSpec(("a",), ("m",), ("position",), 10.0))
SAMPLED = Latency((0, 1, 2, 5), (0.3, 0.3, 0.2, 0.2))
EXECUTORS = (Receding(3), Receding(None), Ensemble(every=1), Ensemble(0.3, "newest", 2), RealTime(3, 2))


@dataclass(frozen=True)
class Outcome:
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    failure: np.ndarray


class Clock:
    """Scenes whose state is the tick and their seed; scene i ends after ``20 + seed % 7`` steps; keeps all actions."""

    spec = RobotSpec((), SPEC.state, SPEC.action)

    def reset(self, seeds: np.ndarray) -> None:
        self.seeds, self.tick = seeds, 0
        self.done = np.zeros(len(seeds), bool)
        self.taken: list[np.ndarray] = []
        self.instructions = ("wait",) * len(seeds)

    def observe(self) -> Observation:
        n = len(self.seeds)
        state = np.stack([np.full(n, self.tick), self.seeds], 1)[:, None].astype(np.float32)
        return Observation({}, {}, state, np.ones((n, 1), bool), self.instructions)

    def step(self, actions: np.ndarray) -> Outcome:
        self.taken.append(actions[:, 0].copy())
        self.tick += 1
        self.done = self.tick >= 20 + self.seeds % 7
        return Outcome(self.done, np.zeros_like(self.done), self.done, np.full(len(self.seeds), "", object))

    def render(self, size: int, rows: np.ndarray) -> np.ndarray:
        return np.zeros((len(rows), size, size, 3), np.uint8)

    def start_hash(self, i: int) -> str:
        return str(self.seeds[i])


class Telling:
    """A planner whose step h says for which tick it is meant: the tick of its observation + h. Plans of the scenes in
    ``broken`` do not decode from their second on."""

    def __init__(self, H: int = H, T: int = 1, broken: Sequence[int] = ()) -> None:
        self.observation_window, self.chunk_length, self.broken = T, H, broken
        self.asked: list[tuple[int, list[int]]] = []
        self.noise: list[float] = []

    def plan(self, observation: Observation, rngs: Sequence[np.random.Generator]) -> Chunk:
        tick, seed = observation.state[:, -1, 0].astype(int), observation.state[:, -1, 1].astype(int)
        self.asked.append((int(tick[0]), seed.tolist()))
        self.noise += [rng.random() for rng in rngs]
        actions = (tick[:, None] + np.arange(self.chunk_length))[..., None].astype(np.float32)
        malformed = np.isin(seed, self.broken) & (tick > 0)
        valid = np.ones(actions.shape[:2], bool) & ~malformed[:, None]
        return Chunk(actions, valid, malformed if self.broken else None)


class Guided(Telling):
    def plan(self, observation: Observation, rngs: Sequence[np.random.Generator], guide: Guide | None = None) -> Chunk:
        self.guides = [*getattr(self, "guides", []), guide]
        return super().plan(observation, rngs)


def run(
    execute: Executor, seeds: Sequence[int], latency: Latency | None, planner: Telling | None = None, **options: object
) -> tuple[np.ndarray, Rollouts, Telling]:
    scenes = Clock()
    planner = planner or (Guided() if isinstance(execute, RealTime) else Telling())
    made = rollout(scenes, seeds, planner, execute, name="p", role="policy", task="clock", latency=latency, **options)
    return np.stack(scenes.taken, 1), made, planner


@pytest.mark.parametrize("execute", EXECUTORS, ids=str)
@pytest.mark.parametrize("latency", [None, Latency(0), Latency(1), Latency(4), SAMPLED], ids=str)
def test_C08_every_step_is_executed_at_the_tick_it_is_meant_for(execute: Executor, latency: Latency | None) -> None:
    """Whatever the latency was thought to be: no step is skipped, none is late, or the tick counts as starved."""
    taken, made, _ = run(execute, [3, 4, 12], latency)
    for row, episode in zip(taken, made.episodes, strict=True):
        off = row[: episode.length] != np.arange(episode.length)
        assert off.sum() == episode.starved
        # A starved tick repeats the action before it.
        np.testing.assert_array_equal(row[1 : episode.length][off[1:]], row[: episode.length - 1][off[1:]])
        assert not off[0]


def test_when_plans_are_asked_for_and_land() -> None:
    _, _, planner = run(Receding(4), [0], Latency(3))
    assert [t for t, _ in planner.asked] == [0, 4, 8, 12, 16]
    # Nothing lands before tick 9, so index 5 of the plan of tick 4 comes first and the next plan is asked for at 10.
    _, _, planner = run(Receding(4), [0], Latency(5))
    assert [t for t, _ in planner.asked] == [0, 4, 10, 16]
    # One plan on its way at a time.
    _, _, planner = run(Ensemble(), [0], Latency(3))
    assert [t for t, _ in planner.asked] == [0, 1, 5, 9, 13, 17]


def test_a_used_up_chunk_is_counted() -> None:
    taken, made, _ = run(Receding(None), [0], Latency(2), Telling(H=4))
    expected = [0, 1, 2, 3, 3, 3, 6, 7, 7, 7, 10, 11, 11, 11, 14, 15, 15, 15, 18, 19]
    np.testing.assert_array_equal(taken[0], expected)
    assert made.episodes[0].starved == 8


def test_the_first_plan_is_waited_for() -> None:
    for latency in (Latency(4), Latency(30)):
        taken, made, _ = run(Receding(4), [0], latency)
        np.testing.assert_array_equal(taken[0, :8], np.arange(8))
        assert made.episodes[0].length == 20
    assert made.episodes[0].starved == 20 - 8


@pytest.mark.parametrize("execute", EXECUTORS, ids=str)
def test_results_do_not_depend_on_the_batch(execute: Executor) -> None:
    seeds = [9, 2, 30, 17]
    taken, together, _ = run(execute, seeds, SAMPLED)
    again, _, _ = run(execute, seeds, SAMPLED)
    np.testing.assert_array_equal(taken, again)
    for i, seed in enumerate(seeds):
        alone, one, _ = run(execute, [seed], SAMPLED)
        length = one.episodes[0].length
        np.testing.assert_array_equal(alone[0, :length], taken[i, :length])
        assert replace(one.episodes[0], plan_ms=0.0) == replace(together.episodes[i], plan_ms=0.0)


def test_latency_leaves_the_noise_of_plans_alone_and_follows_the_noise_seed() -> None:
    plain, late = (run(Receding(1), [4], latency)[2] for latency in (None, Latency((0,), (1.0,))))
    assert plain.noise == late.noise
    ticks = [[t for t, _ in run(Receding(1), [4], SAMPLED, noise_seed=s)[2].asked] for s in (0, 0, 1)]
    assert ticks[0] == ticks[1] != ticks[2]


def test_draws_follow_the_probabilities() -> None:
    rng = np.random.default_rng(0)
    latency = Latency((0, 7, 2), (0.0, 0.25, 0.75))
    drawn = [latency.draw(rng) for _ in range(4000)]
    assert set(drawn) == {2, 7}
    assert np.mean(np.array(drawn) == 7) == pytest.approx(0.25, abs=0.03)
    assert {Latency(3).draw(rng) for _ in range(5)} == {3}


def test_latencies_that_mean_nothing_are_refused() -> None:
    for bad in (-1, 1.5, True, (), (1, -2)):
        with pytest.raises(ConfigError, match="whole ticks"):
            Latency(bad, (0.5, 0.5))
    with pytest.raises(ConfigError, match="with their probabilities"):
        Latency((1, 2))
    with pytest.raises(ConfigError, match="with their probabilities"):
        Latency(1, (1.0,))
    for bad in ((1.0,), (0.5, 0.6), (-0.5, 1.5), (float("nan"), 1.0)):
        with pytest.raises(ConfigError, match="sum to 1"):
            Latency((1, 2), bad)


def test_guides_go_to_planners_that_can_be_guided_and_to_no_others() -> None:
    _, _, planner = run(RealTime(4, 2), [0, 1], Latency(2))
    assert not planner.guides[0].weights.any()
    later = planner.guides[1]
    assert later.weights.shape == (2, H)
    # Asked for at tick 4: the old plan says 4, 5, 6, 7 for the ticks from now on.
    np.testing.assert_array_equal(later.actions[0, :, 0], [4, 5, 6, 7, 0, 0, 0, 0])
    np.testing.assert_array_equal(later.weights[0, :2], 1)
    np.testing.assert_array_equal(later.delay, [2, 2])
    assert run(Receding(2), [0], None, Guided())[2].guides[0] is None

    class Proud(Telling):
        def plan(self, observation: Observation, rngs: Sequence, guide: Guide | None = None) -> Chunk:
            if guide is not None:
                raise ConfigError("cannot be guided")
            return super().plan(observation, rngs)

    with pytest.raises(ConfigError, match="cannot be guided"):
        run(RealTime(4, 2), [0], None, Proud())


def test_a_guide_for_all_scenes_goes_to_a_planner_of_all_scenes() -> None:
    _, _, planner = run(RealTime(4, 2), [0, 6], SAMPLED, whole=True)
    assert {g.weights.shape for g in planner.guides} == {(2, H)}
    assert all(seeds == [0, 6] for _, seeds in planner.asked)


def test_malformed_plans_are_counted_and_only_their_scene_stands_still() -> None:
    taken, made, _ = run(Receding(4), [1, 2], None, Telling(broken=[2]))
    assert [e.malformed for e in made.episodes] == [0, 5]
    assert [e.starved for e in made.episodes] == [0, 18]
    np.testing.assert_array_equal(taken[0], np.arange(22)[: taken.shape[1]])
    np.testing.assert_array_equal(taken[1], [0, 1, 2, *[3] * 19])


@pytest.mark.parametrize(("T", "k"), list(itertools.product((1, 2, 3), (1, 2, 3, 4, 5))))
def test_C10_any_window_executes_exactly_k_steps_from_now(T: int, k: int) -> None:
    if k > 4:
        with pytest.raises(ConfigError, match="k=5, H=4"):
            run(Receding(k), [0], None, Telling(H=4, T=T))
        return
    taken, _, planner = run(Receding(k), [0], None, Telling(H=4, T=T))
    np.testing.assert_array_equal(taken[0], np.arange(20))
    assert [t for t, _ in planner.asked] == list(range(0, 20, k))


def test_plan_ms_is_the_mean_share_of_a_batched_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(rollout_module.time, "perf_counter", lambda: 0.1 * next(ticks))
    _, made, planner = run(Receding(7), [0, 6], Latency(0))
    assert [len(seeds) for _, seeds in planner.asked] == [2, 2, 2, 1]
    assert [e.plan_ms for e in made.episodes] == pytest.approx([50, (3 * 50 + 100) / 4])


def test_counts_are_in_the_parquet_file_and_old_files_still_read(tmp_path: Path) -> None:
    _, made, _ = run(Receding(4), [1, 2], None, Telling(broken=[2]))
    table = pa.Table.from_pylist([asdict(e) for e in made.episodes])
    pq.write_table(table, tmp_path / "rollouts.parquet")
    assert read_rollouts(tmp_path) == made.episodes
    pq.write_table(table.drop_columns(["malformed", "starved"]), tmp_path / "rollouts.parquet")
    assert [(e.malformed, e.starved) for e in read_rollouts(tmp_path)] == [(0, 0), (0, 0)]
    wrong = table.set_column(table.column_names.index("starved"), "starved", pa.array(["many", "few"]))
    pq.write_table(wrong, tmp_path / "rollouts.parquet")
    with pytest.raises(DataError, match="int as starved"):
        read_rollouts(tmp_path)
