"""Chunks -> one action per control tick. Pure: ``step(state, plan) -> (action, state)``, one row per environment.

Names: a chunk has H actions, k of them are executed before the next plan is asked for. A plan that was asked for
some ticks ago (its ``age``) is taken in at index ``age``: the steps before belong to ticks that are over. The age is
counted, never estimated.

Two things can leave a tick without a decision, and both repeat the last executed action and are counted per row:
``held``, the step is marked invalid by its plan; ``starved``, the chunk is used up and the next plan is not here yet.

This file: the state, ``Receding`` and what all executors share. ``vola.ensemble`` and ``vola.realtime`` hold the
other two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, final

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from vola.errors import ConfigError, InputError, expect_positive, expect_shape
from vola.types import Chunk, Guide

Age = int | Int64[np.ndarray, " r"]


@dataclass(frozen=True)
class Blend:
    """Predictions of all plans for the H ticks of the newest one: weighted sum (float64 ``B H A``), sum of weights
    (``B H``), how many plans decided that step, and their smallest and largest action."""

    total: Float64[np.ndarray, "B H A"]
    weight: Float64[np.ndarray, "B H"]
    count: Int64[np.ndarray, "B H"]
    low: Float32[np.ndarray, "B H A"]
    high: Float32[np.ndarray, "B H A"]


@dataclass(frozen=True)
class ExecutorState:
    """What is executed if nothing new arrives, per row.

    actions: float32 ``B H A``, index 0 = the tick whose observation the newest plan saw.
    fresh: ``B H``, False where no plan decided and the action before is repeated.
    cursor: the next index = ticks since that observation; -1 before the first plan of an episode.
    begun: the index at which the newest plan was taken in.
    earlier: ``2 B``, ``held`` and ``starved`` up to then.
    blend: only for executors that average.
    """

    actions: Float32[np.ndarray, "B H A"]
    fresh: Bool[np.ndarray, "B H"]
    cursor: Int64[np.ndarray, " B"]
    begun: Int64[np.ndarray, " B"]
    earlier: Int64[np.ndarray, "2 B"]
    blend: Blend | None = None

    # Counted when asked for and not at every tick: popping an action stays cheap.
    @property
    def held(self) -> Int64[np.ndarray, " B"]:
        """Ticks of this episode that repeated the last action because no plan decided the step."""
        steps = np.arange(self.fresh.shape[1])
        over = (steps >= self.begun[:, None]) & (steps < self.cursor[:, None])
        return self.earlier[0] + (over & ~self.fresh).sum(1)

    @property
    def starved(self) -> Int64[np.ndarray, " B"]:
        """Ticks of this episode that repeated the last action because the chunk was used up."""
        return self.earlier[1] + np.maximum(self.cursor - np.maximum(self.begun, self.fresh.shape[1]), 0)


class Executor(Protocol):
    """How chunks become actions. Settings only; everything that changes is in the state."""

    def start(self, B: int, H: int, A: int) -> ExecutorState:
        """Before the first tick: every row is due. Raises ConfigError where the settings do not fit H."""
        ...

    def due(self, state: ExecutorState) -> Bool[np.ndarray, " B"]:
        """Rows whose next plan must be asked for now, from this tick's observation.

        A row stays due until its plan is taken in; the caller knows which plans are on their way.
        """
        ...

    def reset(self, state: ExecutorState, rows: Bool[np.ndarray, " B"]) -> ExecutorState:
        """Forget everything of these rows; plans asked for before must not be handed in any more."""
        ...

    def guide(self, state: ExecutorState, rows: Bool[np.ndarray, " B"]) -> Guide | None:
        """What the plans for ``rows`` (r of them) have to continue; None for executors without guidance."""
        ...

    def step(
        self,
        state: ExecutorState,
        plan: Chunk | None = None,
        rows: Bool[np.ndarray, " B"] | None = None,
        age: Age = 0,
    ) -> tuple[Float32[np.ndarray, "B A"], ExecutorState]:
        """Take in the chunks that arrived for ``rows`` (all rows if None), then pop one action per row.

        ``age``: ticks between the observation a plan was made from and now, one number or one per chunk. A row that
        has not acted since its start begins at index 0 whatever the age: nothing of its plan has been executed.

        Raises:
            InputError: a row has no chunk yet and got none; ``plan`` does not have one chunk per row of ``rows``; a
                plan is older than the one in execution; an action that would be executed is not finite.
        """
        ...


@final
@dataclass(frozen=True)
class Receding:
    """Receding horizon: execute k of H, then replan. k = None is open loop (the whole chunk), k = 1 replans every tick.

    While the next plan is on its way the rest of the chunk is executed; then the new chunk replaces it at index
    ``age``, wherever it continues from.
    """

    k: int | None = 4

    def __post_init__(self) -> None:
        if self.k is not None:
            expect_positive("executor", k=self.k)

    def start(self, B: int, H: int, A: int) -> ExecutorState:
        """Before the first tick: every row is due for a plan.

        Raises:
            ConfigError: k > H, a chunk does not last that long.
        """
        if self.k is not None and self.k > H:
            raise ConfigError(f"executor: expected k <= H, got k={self.k}, H={H}. Execute fewer steps or predict more.")
        return start(B, H, A)

    def due(self, state: ExecutorState) -> Bool[np.ndarray, " B"]:
        """Rows that have no chunk or have executed k of it."""
        return due(state, state.actions.shape[1] if self.k is None else self.k)

    def reset(self, state: ExecutorState, rows: Bool[np.ndarray, " B"]) -> ExecutorState:
        """Forget the chunks of these rows: what an episode leaves behind never reaches the next one."""
        return reset(state, rows)

    def guide(self, state: ExecutorState, rows: Bool[np.ndarray, " B"]) -> None:
        """A plan starts afresh."""

    def step(
        self,
        state: ExecutorState,
        plan: Chunk | None = None,
        rows: Bool[np.ndarray, " B"] | None = None,
        age: Age = 0,
    ) -> tuple[Float32[np.ndarray, "B A"], ExecutorState]:
        """See ``Executor.step``."""
        return pop(state if plan is None else succeed(state, plan, rows, age))


def start(B: int, H: int, A: int) -> ExecutorState:
    """B rows without a chunk."""
    actions, fresh = np.zeros((B, H, A), np.float32), np.zeros((B, H), bool)
    return ExecutorState(actions, fresh, np.full(B, -1), np.zeros(B, np.int64), np.zeros((2, B), np.int64))


def due(state: ExecutorState, k: int) -> Bool[np.ndarray, " B"]:
    """Rows without a chunk, or k ticks after the observation of their newest plan."""
    return (state.cursor < 0) | (state.cursor >= k)


def reset(state: ExecutorState, rows: Bool[np.ndarray, " B"]) -> ExecutorState:
    """These rows as before their first plan, with counts of 0."""
    rows = _mask(rows, len(state.cursor))
    cursor, begun = np.where(rows, -1, state.cursor), np.where(rows, 0, state.begun)
    return replace(state, cursor=cursor, begun=begun, earlier=np.where(rows, 0, state.earlier))


def pop(state: ExecutorState) -> tuple[Float32[np.ndarray, "B A"], ExecutorState]:
    """One action per row. Raises InputError where a row never got a chunk."""
    cursor, last = state.cursor, state.actions.shape[1] - 1
    if np.minimum.reduce(cursor, initial=0) < 0:
        late = np.flatnonzero(cursor < 0).tolist()
        raise InputError(
            f"executor: rows {late[:8]} have no chunk, or their old one was used up before a reset. Hand in a plan for "
            "the rows in `due` first; the first plan of an episode must be waited for."
        )
    # A used-up chunk ends with the action that was executed last.
    action = state.actions[np.arange(len(cursor)), np.minimum(cursor, last)]
    return action, ExecutorState(state.actions, state.fresh, cursor + 1, state.begun, state.earlier, state.blend)


def succeed(
    state: ExecutorState, plan: Chunk, rows: Bool[np.ndarray, " B"] | None = None, age: Age = 0
) -> ExecutorState:
    """The state after new chunks replaced those of ``rows``, each at index ``age``."""
    index, ages = arrivals(state, plan, rows, age)
    return put(state, index, ages, plan.actions, plan.valid)


def arrivals(
    state: ExecutorState, plan: Chunk, rows: Bool[np.ndarray, " B"] | None, age: Age
) -> tuple[Int64[np.ndarray, " r"], Int64[np.ndarray, " r"]]:
    """Row number and the index to begin at, per chunk of ``plan``; raises what ``Executor.step`` raises."""
    B, H, A = state.actions.shape
    index = np.arange(B) if rows is None else np.flatnonzero(_mask(rows, B))
    if plan.actions.shape != (len(index), H, A):
        raise InputError(f"plan: expected {len(index)} chunks of shape {(H, A)}, got {plan.actions.shape}")
    expect_shape("plan.valid", plan.valid, "B H", B=len(index), H=H)
    given = np.asarray(age)
    if given.dtype.kind != "i" or given.shape not in ((), (len(index),)) or (given < 0).any():
        raise InputError(f"age: expected whole numbers >= 0, one or one per chunk ({len(index)}), got {age!r:.80}")
    cursor = state.cursor[index]
    ages = np.where(cursor < 0, 0, given)
    late = ages >= cursor
    if (late & (cursor >= 0)).any():
        bad = int(np.flatnonzero(late & (cursor >= 0))[0])
        raise InputError(
            f"age: expected a newer plan than the one in execution, whose observation row {index[bad]} saw "
            f"{cursor[bad]} ticks ago, got one of age {ages[bad]}. Drop plans that were overtaken."
        )
    return index, ages


def put(
    state: ExecutorState,
    index: Int64[np.ndarray, " r"],
    ages: Int64[np.ndarray, " r"],
    actions: Float32[np.ndarray, "r H A"],
    fresh: Bool[np.ndarray, "r H"],
) -> ExecutorState:
    """Write ``actions`` to rows ``index`` with their cursor at ``ages``; steps that are not fresh become the action
    that will have been executed before. Where nothing was executed yet the first action stands as it is."""
    H = actions.shape[1]
    cursor = state.cursor[index]
    before = state.actions[index, np.clip(cursor - 1, 0, H - 1)]
    before = np.where((cursor < 0)[:, None], actions[:, 0], before)
    steps = np.arange(H)
    decided = fresh & (steps >= ages[:, None])
    source = np.maximum.accumulate(np.where(decided, steps, -1), axis=1)
    held = np.where((source >= 0)[..., None], np.take_along_axis(actions, np.maximum(source, 0)[..., None], 1),
                    before[:, None])  # fmt: skip
    if not np.isfinite(held).all():
        bad = index[~np.isfinite(held).all((1, 2))].tolist()
        raise InputError(f"plan: expected finite actions, got NaN or infinity for the rows {bad[:8]}")
    new = [part.copy() for part in (state.actions, state.fresh, state.cursor, state.begun, state.earlier.T)]
    counts = np.stack([state.held, state.starved], 1)[index]
    for part, value in zip(new, (held, decided, ages, ages, counts), strict=True):
        part[index] = value
    return replace(state, actions=new[0], fresh=new[1], cursor=new[2], begun=new[3], earlier=new[4].T)


def _mask(rows: Bool[np.ndarray, " B"], B: int) -> Bool[np.ndarray, " B"]:
    mask = np.asarray(rows)
    if mask.dtype != np.bool_ or mask.shape != (B,):
        raise InputError(f"rows: expected {B} times True or False, got {mask.dtype} of shape {mask.shape}")
    return mask
