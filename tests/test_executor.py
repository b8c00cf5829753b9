"""Executors against brute-force references that keep every plan, the published weights, and what must not matter."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from vola.ensemble import Ensemble
from vola.errors import ConfigError, InputError
from vola.executor import Executor, ExecutorState, Receding
from vola.realtime import RealTime, guidance_weights
from vola.theory.filters import ensemble_response, ensemble_weights
from vola.types import Chunk, Guide

GOLDEN = Path(__file__).parent / "golden" / "act" / "ensembler.safetensors"
EACH = pytest.mark.parametrize(
    "execute", [Receding(3), Ensemble(every=1), RealTime(2, 1)], ids=lambda e: type(e).__name__
)


def chunk(B: int, H: int, A: int = 2, base: float = 0.0) -> Chunk:
    """Action h of row b is base + 100 b + h in every dimension."""
    values = base + 100 * np.arange(B)[:, None, None] + np.arange(H)[None, :, None] + np.zeros((B, H, A))
    return Chunk(values.astype(np.float32), np.ones((B, H), bool))


def constant(value: float, H: int, A: int = 1) -> Chunk:
    return Chunk(np.full((1, H, A), value, np.float32), np.ones((1, H), bool))


# ---------------------------------------------------------------- the brute-force reference


@dataclass
class Asked:
    """A plan of one row: the tick whose observation it saw and what it says."""

    tick: int
    actions: np.ndarray
    valid: np.ndarray


class Reference:
    """One row of an executor, written from the definitions: keeps all plans and looks them up every tick."""

    def __init__(self, execute: Executor, H: int) -> None:
        self.execute, self.H, self.now = execute, H, 0
        self.forget()

    def forget(self) -> None:
        self.plans: list[Asked] = []
        self.done: list[np.ndarray] = []
        self.held = self.starved = 0

    def due(self) -> bool:
        k = self.H if self.execute.k is None else self.execute.k
        return not self.plans or self.now - self.plans[-1].tick >= k

    def prediction(self) -> np.ndarray | None:
        said = []
        for plan in self.plans if isinstance(self.execute, Ensemble) else self.plans[-1:]:
            h = self.now - plan.tick
            if h < self.H and plan.valid[h]:
                said.append(plan.actions[h].astype(np.float64))
        if not said:
            return None
        if not isinstance(self.execute, Ensemble):
            return said[0]
        ranked = said if self.execute.heaviest == "oldest" else said[::-1]
        w = np.exp(-self.execute.m * np.arange(len(ranked)))
        return sum(a * x for a, x in zip(ranked, w, strict=True)) / w.sum()

    def step(self, plan: Asked | None) -> np.ndarray:
        if plan is not None:
            if not self.done:
                plan.tick = self.now
            self.plans.append(plan)
        action = self.prediction()
        if action is None:
            action = self.done[-1] if self.done else self.plans[-1].actions[0]
            used_up = self.now - self.plans[-1].tick >= self.H
            self.starved += used_up
            self.held += not used_up
        self.done.append(np.float32(action))
        self.now += 1
        return self.done[-1]


def schedule(rng: np.random.Generator, make: Callable[[np.random.Generator, int], Executor]) -> None:
    """One random run: chunk length, delays, resets, which rows' plans arrive, invalid steps; compared tick by tick."""
    H, B, A = int(rng.integers(2, 7)), int(rng.integers(1, 4)), 2
    execute = make(rng, H)
    longest, broken = int(rng.integers(0, H + 3)), float(rng.choice([0.0, 0.3]))
    state, references = execute.start(B, H, A), [Reference(execute, H) for _ in range(B)]
    coming: list[tuple[int, Asked] | None] = [None] * B
    due: list[tuple[np.ndarray, list[bool]]] = []
    seen: list[tuple[np.ndarray, list[np.ndarray]]] = []
    counts: list[tuple[np.ndarray, list[list[int]]]] = []
    for tick in range(10):
        if rng.random() < 0.1:
            rows = rng.random(B) < 0.5
            state = execute.reset(state, rows)
            for b in np.flatnonzero(rows):
                references[b].forget()
                coming[b] = None
        due.append((execute.due(state), [r.due() for r in references]))
        for b in range(B):
            if references[b].due() and coming[b] is None:
                late = int(rng.integers(0, longest + 1)) if references[b].done else 0
                actions = rng.standard_normal((H, A)).astype(np.float32) * (rng.random((H, 1)) < 0.9)
                coming[b] = tick + late, Asked(tick, actions, rng.random(H) >= broken)
        arrived = np.array([c is not None and c[0] == tick for c in coming])
        here = [coming[b][1] for b in np.flatnonzero(arrived)]
        plan = age = None
        if here:
            # What an invalid step says must not matter, unless it is the very first: there is nothing to repeat.
            first = [not references[b].done for b in np.flatnonzero(arrived)]
            told = [np.where(p.valid[:, None] | f, p.actions, np.nan) for p, f in zip(here, first, strict=True)]
            plan, age = (
                Chunk(np.stack(told), np.stack([p.valid for p in here])),
                np.array([tick - p.tick for p in here]),
            )
        expected = [r.step(coming[b][1] if arrived[b] else None) for b, r in enumerate(references)]
        coming = [None if a else c for a, c in zip(arrived, coming, strict=True)]
        action, state = execute.step(state, plan, arrived, 0 if age is None else age)
        seen.append((action, expected))
        counts.append((np.stack([state.held, state.starved], 1), [[r.held, r.starved] for r in references]))
    for made in (due, counts):
        np.testing.assert_array_equal(*zip(*made, strict=True))
    np.testing.assert_allclose(*zip(*seen, strict=True), rtol=2e-6, atol=2e-6)


def some_ensemble(rng: np.random.Generator, H: int) -> Ensemble:
    m, heaviest = float(rng.choice([0.0, 0.01, 0.5, 3.0])), ("oldest", "newest")[rng.integers(2)]
    return Ensemble(m, heaviest, int(rng.integers(1, H + 1)))


def some_real_time(rng: np.random.Generator, H: int) -> RealTime:
    k = int(rng.integers(1, H + 1))
    return RealTime(k, int(rng.integers(0, H - k + 1)))


@pytest.mark.parametrize(
    "make",
    [lambda rng, H: Receding([None, *range(1, H + 1)][rng.integers(H + 1)]), some_ensemble, some_real_time],
    ids=["Receding", "Ensemble", "RealTime"],
)
def test_equals_the_reference_over_1000_random_schedules(make: Callable[[np.random.Generator, int], Executor]) -> None:
    for seed in range(1000):
        schedule(np.random.default_rng(seed), make)


# ---------------------------------------------------------------- receding horizon


@pytest.mark.parametrize(("k", "H"), [(1, 4), (3, 4), (4, 4), (None, 4)])
def test_executes_the_first_k_of_every_chunk(k: int | None, H: int) -> None:
    execute, seen = Receding(k), []
    k = k or H
    state = execute.start(2, H, 2)
    for tick in range(3 * k):
        due = execute.due(state)
        assert due.all() == (tick % k == 0)
        plan = chunk(2, H, base=1000.0 * tick) if due.any() else None
        action, state = execute.step(state, plan)
        seen.append(action[:, 0])
    expected = [[1000 * (t - t % k) + 100 * b + t % k for b in range(2)] for t in range(3 * k)]
    np.testing.assert_array_equal(seen, expected)


@EACH
def test_rows_are_independent_and_reset_forgets_only_theirs(execute: Executor) -> None:
    _, state = execute.step(execute.start(3, 4, 2), chunk(3, 4))
    state = execute.reset(state, np.array([False, True, False]))
    assert execute.due(state)[1]
    action, state = execute.step(state, chunk(1, 4, base=5000.0), np.array([False, True, False]))
    np.testing.assert_array_equal(action[:, 0], [1, 5000, 201])


@EACH
def test_C03_an_old_chunk_never_survives_a_reset(execute: Executor) -> None:
    state = execute.start(3, 10, 1)
    actions = np.arange(30, dtype=np.float32).reshape(3, 10, 1)
    _, state = execute.step(state, Chunk(actions, np.ones((3, 10), bool)))
    for _ in range(2):
        _, state = execute.step(state)
    rows = np.array([False, True, False])
    once = execute.reset(state, rows)
    twice = execute.reset(once, rows)
    np.testing.assert_array_equal(once.cursor, twice.cursor)
    with pytest.raises(InputError, match="used up"):
        execute.step(once)
    action, _ = execute.step(twice, constant(7.0, 10), rows)
    np.testing.assert_array_equal(action[:, 0], [3, 7, 23])
    guide = execute.guide(execute.reset(state, np.ones(3, bool)), np.ones(3, bool))
    assert guide is None or (not guide.weights.any() and not guide.actions.any())


@EACH
def test_step_is_pure(execute: Executor) -> None:
    _, before = execute.step(execute.start(2, 4, 2), chunk(2, 4))
    kept = {name: getattr(before, name).copy() for name in ("actions", "fresh", "cursor", "begun", "earlier")}
    blend = {} if before.blend is None else {name: value.copy() for name, value in vars(before.blend).items()}
    first, _ = execute.step(before, chunk(2, 4, base=9.0))
    again, _ = execute.step(before, chunk(2, 4, base=9.0))
    np.testing.assert_array_equal(first, again)
    for name, value in kept.items():
        np.testing.assert_array_equal(getattr(before, name), value)
    for name, value in blend.items():
        np.testing.assert_array_equal(getattr(before.blend, name), value)


@EACH
def test_what_another_row_does_changes_nothing(execute: Executor) -> None:
    rng = np.random.default_rng(3)
    plans = rng.standard_normal((8, 2, 4, 2)).astype(np.float32)
    ok = np.ones((2, 4), bool)

    def row_zero(other: bool) -> list[np.ndarray]:
        state, seen = execute.start(2, 4, 2), []
        for t in range(8):
            if other and t in (3, 5):
                state = execute.reset(state, np.array([False, True]))
            mask = np.array([t % 2 == 0, t == 0 or (other and t in (1, 3, 5))])
            action, state = execute.step(state, Chunk(plans[t][mask], ok[mask]), mask)
            seen.append(action[0])
        return seen

    np.testing.assert_array_equal(row_zero(True), row_zero(False))


@EACH
def test_undecided_steps_repeat_the_last_action_and_are_counted(execute: Executor) -> None:
    made = chunk(1, 4)
    made.actions[0, 1:3] = np.nan
    action, state = execute.step(execute.start(1, 4, 2), Chunk(made.actions, np.array([[True, False, False, True]])))
    seen = [action[0, 0]]
    for _ in range(5):
        action, state = execute.step(state)
        seen.append(action[0, 0])
    assert seen == [0, 0, 0, 3, 3, 3]
    assert (state.held.item(), state.starved.item()) == (2, 2)
    state = execute.reset(state, np.array([True]))
    assert (state.held.item(), state.starved.item()) == (0, 0)


@EACH
def test_a_plan_that_decides_nothing_leaves_the_robot_where_it_is(execute: Executor) -> None:
    _, state = execute.step(execute.start(1, 4, 1), constant(5.0, 4))
    nothing = Chunk(np.full((1, 4, 1), 9.0, np.float32), np.zeros((1, 4), bool))
    seen, expected = [], [5.0] * 4
    for t in range(4):
        action, state = execute.step(state, nothing if t == 0 else None)
        seen.append(action.item())
    assert seen == expected
    # The ensemble still has the first plan, which covers three of these ticks.
    assert state.held.item() == (1 if isinstance(execute, Ensemble) else 4)
    first, state = execute.step(execute.start(1, 4, 1), nothing)
    assert (first.item(), state.held.item()) == (9.0, 1)


@EACH
def test_C08_the_age_decides_the_splice_and_nothing_is_skipped_before_the_first_step(execute: Executor) -> None:
    ramp = Chunk(np.arange(30, dtype=np.float32)[None, :, None], np.ones((1, 30), bool))
    first, state = execute.step(execute.start(1, 30, 1), ramp, age=21)
    assert first.item() == 0
    seen = [0.0]
    for _ in range(4):
        action, state = execute.step(state)
        seen.append(action.item())
    # Expected to take 5 ticks, 4 were executed since the observation at tick 1.
    later = Chunk(ramp.actions + 1, ramp.valid)
    action, state = execute.step(state, later, age=4)
    seen.append(action.item())
    assert np.abs(np.diff(seen)).max() <= 1
    np.testing.assert_allclose(seen, np.arange(6), rtol=1e-6)
    with pytest.raises(InputError, match="newer plan"):
        execute.step(state, ramp, age=5)
    for bad in (-1, 0.5, True, np.array([1, 2])):
        with pytest.raises(InputError, match="whole numbers"):
            execute.step(state, later, age=bad)


def test_C10_horizons_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="k=5, H=4"):
        Receding(5).start(1, 4, 2)
    with pytest.raises(ConfigError, match="every=5, H=4"):
        Ensemble(every=5).start(1, 4, 2)
    with pytest.raises(ConfigError, match="k=3, delay=2, H=4"):
        RealTime(3, 2).start(1, 4, 2)
    for bad in (0, -1, 2.5, True, "3"):
        with pytest.raises(ConfigError, match="k >= 1"):
            Receding(bad)
        with pytest.raises(ConfigError, match="k >= 1"):
            RealTime(bad, 0)
    for bad in (-1, 1.0, False):
        with pytest.raises(ConfigError, match="delay >= 0"):
            RealTime(2, bad)
    with pytest.raises(ConfigError, match="schedule"):
        RealTime(2, 0, schedule="cosine")
    with pytest.raises(ConfigError, match="method"):
        RealTime(2, 0, method="jacobian")
    for bad in (0.0, float("inf"), float("nan"), True):
        with pytest.raises(ConfigError, match="limit"):
            RealTime(2, 0, limit=bad)


@EACH
def test_plans_that_do_not_fit_are_refused(execute: Executor) -> None:
    state = execute.start(2, 4, 2)
    with pytest.raises(InputError, match="expected 2 chunks"):
        execute.step(state, chunk(1, 4))
    with pytest.raises(InputError, match="plan for the rows"):
        execute.step(state)
    with pytest.raises(InputError, match="True or False"):
        execute.step(state, chunk(1, 4), np.array([0]))
    broken = chunk(2, 4)
    broken.actions[1, 2] = np.nan
    with pytest.raises(InputError, match=r"finite actions.*rows \[1\]"):
        execute.step(state, broken)


# ---------------------------------------------------------------- temporal ensembling


def ensembled(execute: Ensemble, plans: np.ndarray) -> tuple[np.ndarray, ExecutorState]:
    """One plan per tick (``L B H A``), the executed actions ``L B A``."""
    L, B, H, A = plans.shape
    state, seen = execute.start(B, H, A), []
    for plan in plans:
        action, state = execute.step(state, Chunk(plan, np.ones((B, H), bool)))
        seen.append(action)
    return np.stack(seen), state


def test_golden_ensembler_of_act() -> None:
    golden = load_file(GOLDEN)
    chunks, expected = golden["input.ensemble_chunks"], golden["expected.ensembled"]
    np.testing.assert_allclose(ensembled(Ensemble(0.01), chunks)[0], expected, rtol=1e-5, atol=2.7e-6)
    assert np.abs(ensembled(Ensemble(0.01, "newest"), chunks)[0] - expected).max() > 1e-3
    raw = golden["expected.ensemble_weights"].astype(np.float64)
    np.testing.assert_allclose(ensemble_weights(0.01, len(raw)), raw / raw.sum(), atol=2e-7)


@pytest.mark.parametrize(
    ("n", "weights"),
    [
        (2, [0.5025, 0.4975]),
        (3, [0.336672, 0.333322, 0.330006]),
        (4, [0.253762, 0.251237, 0.248738, 0.246263]),
        (100, [0.015741, *[None] * 98, 0.005849]),
    ],
)
def test_golden_weights_oldest_first(n: int, weights: list[float | None]) -> None:
    """The weight of each query is what a chunk of 1 among chunks of 0 contributes."""
    for i, expected in enumerate(weights):
        if expected is None:
            continue
        plans = np.zeros((n, 1, n, 1), np.float32)
        plans[i] = 1
        assert ensembled(Ensemble(0.01), plans)[0][-1].item() == pytest.approx(expected, abs=6e-7 if n > 2 else 6e-5)
        assert ensemble_weights(0.01, n)[i] == pytest.approx(expected, abs=6e-7 if n > 2 else 6e-5)
        reversed_ = ensembled(Ensemble(0.01, "newest"), plans)[0][-1].item()
        assert reversed_ == pytest.approx(ensemble_weights(0.01, n)[n - 1 - i], abs=1e-6)


@pytest.mark.parametrize("m", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("heaviest", ["oldest", "newest"])
def test_C01_the_running_form_equals_the_closed_form(m: float, heaviest: str) -> None:
    plans = np.arange(1, 9, dtype=np.float32)[:, None, None, None] * np.ones((1, 1, 4, 1), np.float32)
    seen, _ = ensembled(Ensemble(m, heaviest), plans)
    for t in range(8):
        live = np.arange(max(0, t - 3), t + 1) + 1.0
        assert seen[t].item() == pytest.approx(ensemble_weights(m, len(live), heaviest) @ live, abs=1e-6)


def test_trap_12_an_action_of_exactly_zero_is_a_prediction() -> None:
    plans = np.stack([np.zeros((1, 4, 1)), np.ones((1, 4, 1))]).astype(np.float32)
    assert ensembled(Ensemble(0.0), plans)[0][1].item() == 0.5


def test_C05_settings_that_mean_nothing_are_refused() -> None:
    for bad in (-0.1, float("nan"), float("inf"), True, "0.01"):
        with pytest.raises(ConfigError, match="m >= 0"):
            Ensemble(bad)
    for bad in (0, 1.5, True):
        with pytest.raises(ConfigError, match="every >= 1"):
            Ensemble(every=bad)
    with pytest.raises(ConfigError, match="heaviest"):
        Ensemble(heaviest="latest")
    # A state of another executor is refused, not executed without averaging.
    _, state = Receding(1).step(Receding(1).start(1, 4, 2), chunk(1, 4))
    with pytest.raises(InputError, match=r"Ensemble\.start"):
        Ensemble().step(state, chunk(1, 4))


def test_C06_predictions_past_their_chunk_are_dropped() -> None:
    plans = np.random.default_rng(0).standard_normal((20, 1, 4, 2)).astype(np.float32)
    seen, state = ensembled(Ensemble(0.3), plans)
    for t in range(20):
        live = [plans[q, 0, t - q] for q in range(max(0, t - 3), t + 1)]
        np.testing.assert_allclose(seen[t, 0], ensemble_weights(0.3, len(live)) @ np.array(live), rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match=r"shape \(4, 2\), got \(1, 6, 2\)"):
        Ensemble(0.3).step(state, chunk(1, 6))


def test_C11_opposite_modes_are_noticed_and_can_be_picked() -> None:
    plans = np.array([1, -1], np.float32)[:, None, None, None] * np.ones((1, 1, 4, 1), np.float32)
    mean, state = ensembled(Ensemble(0.0), plans)
    assert mean[1].item() == 0
    assert Ensemble(0.0).disagreement(state).item() == 2
    assert ensembled(Ensemble(50.0), plans)[0][1].item() == 1
    assert ensembled(Ensemble(50.0, "newest"), plans)[0][1].item() == -1
    _, alone = Ensemble().step(Ensemble().start(1, 4, 1), constant(3.0, 4))
    assert Ensemble().disagreement(alone).item() == 0
    assert Ensemble().disagreement(Ensemble().start(1, 4, 1)).item() == 0


@pytest.mark.parametrize(("m", "heaviest"), [(0.0, "oldest"), (0.2, "oldest"), (0.2, "newest")])
def test_the_ensembler_is_the_filter_of_theory(m: float, heaviest: str) -> None:
    n, L, frequencies = 6, 40, np.array([0.0, 0.05, 0.2, 0.31, 0.5])
    wave = np.exp(2j * np.pi * frequencies * np.arange(L)[:, None])  # what plan q adds, the same for all its steps
    added = np.concatenate([wave.real, wave.imag], 1)[:, None, None].repeat(n, 2).astype(np.float32)
    seen = ensembled(Ensemble(m, heaviest), added)[0][-1, 0]
    got = (seen[:5] + 1j * seen[5:]) / wave[-1]
    np.testing.assert_allclose(got, ensemble_response(m, n, frequencies, heaviest), atol=1e-5)


def test_filter_passes_the_mean_and_obeys_parseval() -> None:
    w = ensemble_weights(0.1, 10)
    f = np.arange(16) / 16
    response = ensemble_response(0.1, 10, f)
    assert response[0] == pytest.approx(1)
    assert np.mean(np.abs(response) ** 2) == pytest.approx(np.sum(w**2))
    # The plain mean of n plans stops every multiple of 1/n.
    np.testing.assert_allclose(np.abs(ensemble_response(0.0, 4, [0.25, 0.5])), 0, atol=1e-12)
    with pytest.raises(InputError, match="m >= 0"):
        ensemble_weights(-1.0, 3)
    with pytest.raises(InputError, match="finite numbers"):
        ensemble_response(0.1, 3, [float("nan")])


# ---------------------------------------------------------------- real-time chunking


def weights(delay: int, end: int, H: int, schedule: str) -> np.ndarray:
    return guidance_weights(np.array([delay]), np.array([end]), H, schedule)[0]


def test_published_guidance_weights() -> None:
    linear = np.array([1, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5, 0, 0, 0, 0])
    np.testing.assert_allclose(weights(2, 6, 10, "linear"), linear)
    np.testing.assert_allclose(weights(2, 6, 10, "exponential"), linear * (np.exp(linear) - 1) / (np.e - 1))
    np.testing.assert_array_equal(weights(2, 6, 10, "ones"), [1] * 6 + [0] * 4)
    np.testing.assert_array_equal(weights(2, 6, 10, "zeros"), [1] * 2 + [0] * 8)
    for schedule in ("linear", "exponential", "ones", "zeros"):
        np.testing.assert_array_equal(weights(9, 3, 6, schedule), [1, 1, 1, 0, 0, 0])
        assert not weights(2, 0, 6, schedule).any()
    with pytest.raises(InputError, match="end"):
        weights(2, 7, 6, "linear")


def after(execute: RealTime, ticks: int, made: Chunk) -> ExecutorState:
    _, state = execute.step(execute.start(len(made.valid), *made.actions.shape[1:]), made)
    for _ in range(ticks - 1):
        _, state = execute.step(state)
    return state


def test_guide_is_the_rest_of_the_chunk_weighted_as_published() -> None:
    execute = RealTime(4, 2, "linear", "identity", 10.0)
    state = after(execute, 4, chunk(3, 10))
    np.testing.assert_array_equal(execute.due(state), [True] * 3)
    state = execute.reset(state, np.array([False, False, True]))
    guide = execute.guide(state, np.array([False, True, True]))
    assert isinstance(guide, Guide)
    np.testing.assert_allclose(guide.weights[0], weights(2, 6, 10, "linear"), rtol=1e-6)
    np.testing.assert_array_equal(guide.actions[0, :, 0], [104, 105, 106, 107, 108, 109, 0, 0, 0, 0])
    assert not guide.weights[1].any()
    assert not guide.actions[1].any()
    np.testing.assert_array_equal(guide.delay, [2, 0])
    assert (guide.method, guide.limit) == ("identity", 10.0)


def test_undecided_steps_guide_nothing_except_what_will_be_executed() -> None:
    execute, valid = RealTime(2, 2, "ones"), np.array([[True, True, True, False, False, True, True, False]])
    guide = execute.guide(after(execute, 2, Chunk(chunk(1, 8).actions, valid)), np.array([True]))
    np.testing.assert_array_equal(guide.weights[0], [1, 1, 0, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(guide.actions[0, :, 0], [2, 2, 0, 5, 6, 0, 0, 0])


def test_a_used_up_chunk_guides_nothing() -> None:
    execute = RealTime(2, 1)
    guide = execute.guide(after(execute, 9, chunk(1, 4)), np.array([True]))
    assert not guide.weights.any()
    assert guide.delay.item() == 0


def test_a_planner_that_follows_its_guide_is_executed_without_a_seam() -> None:
    """Delay 2 as expected: what was executed while planning is the beginning of the new chunk."""
    execute, rng = RealTime(3, 2, "zeros"), np.random.default_rng(0)
    state, coming, seen, promised = execute.start(1, 6, 1), None, [], []
    for tick in range(20):
        if execute.due(state).any() and coming is None:
            guide = execute.guide(state, np.array([True]))
            free = rng.standard_normal((1, 6, 1)).astype(np.float32)
            made = np.where(guide.weights[..., None] == 1, guide.actions, free)
            coming = tick, Chunk(made, np.ones((1, 6), bool))
            promised.append((tick, made[0, :2, 0]))
        arrived = coming is not None and tick - coming[0] == (2 if seen else 0)
        action, state = execute.step(state, coming[1] if arrived else None, None, tick - coming[0] if arrived else 0)
        coming = None if arrived else coming
        seen.append(action.item())
    assert len(promised) > 3
    for tick, first in promised[:-1]:
        np.testing.assert_array_equal(seen[tick : tick + 2], first)
    assert state.starved.item() == 0


# ---------------------------------------------------------------- speed


@EACH
def test_popping_costs_microseconds(execute: Executor) -> None:
    """100 environments; the bound is 20 microseconds per environment step, benchmarks/executor.py also measures one."""
    _, state = execute.step(execute.start(100, 16, 2), chunk(100, 16))
    times = []
    for _ in range(14):
        start = time.perf_counter()
        _, state = execute.step(state)
        times.append(time.perf_counter() - start)
    assert np.median(times) / 100 < 20e-6
