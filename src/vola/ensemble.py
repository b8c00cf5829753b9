"""Temporal ensembling: the executed action is a weighted mean of what all recent plans said about this tick."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, final

import numpy as np
from jaxtyping import Bool, Float32, Int64

from vola.cite import Source
from vola.errors import ConfigError, InputError, expect_positive
from vola.executor import Age, Blend, ExecutorState, arrivals, due, pop, put, reset, start
from vola.types import Chunk


@final
@dataclass(frozen=True)
class Ensemble:
    """Replan every ``every`` ticks and average the predictions for the same tick with weights exp(-m * rank).

    heaviest: "oldest" gives rank 0, the largest weight, to the oldest query (ACT); "newest" is the other order.
    m: 0 is the plain mean; the weight of a prediction falls by the factor exp(-m) per rank. Large m picks instead of
        averaging (m = 50: the heaviest alone), for demonstrations with several ways whose mean is none of them.

    Only steps that their plan marks valid are predictions; an action of exactly zero is one (ACT's code takes it for
    an empty slot). Ranks count the predictions that exist for a tick, so they have no gaps. At most
    ceil(H / every) plans overlap. Memory does not grow with their number: sums are kept, not plans.
    """

    m: float = 0.01
    heaviest: Literal["oldest", "newest"] = "oldest"
    every: int = 1

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Zhao et al., Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware (ACT), 2023",
            "section IV-A, temporal ensemble",
            "rank 0 = oldest query unless heaviest = 'newest'; m = 0.01 as in the authors' code",
            "https://arxiv.org/abs/2304.13705",
        ),
    )

    def __post_init__(self) -> None:
        expect_positive("ensemble", every=self.every)
        if isinstance(self.m, bool) or not isinstance(self.m, int | float) or not 0 <= self.m < np.inf:
            raise ConfigError(f"ensemble: expected a finite m >= 0, got {self.m!r}. m = 0 is the plain mean.")
        if self.heaviest not in ("oldest", "newest"):
            raise ConfigError(f"ensemble: expected heaviest 'oldest' or 'newest', got {self.heaviest!r}")

    @property
    def k(self) -> int:
        """Ticks between plans, as ``Receding.k``."""
        return self.every

    def start(self, B: int, H: int, A: int) -> ExecutorState:
        """Before the first tick. Raises ConfigError: every > H, a chunk does not last until the next plan."""
        if self.every > H:
            raise ConfigError(f"ensemble: expected every <= H, got every={self.every}, H={H}. Plan more often.")
        shape = (B, H, A)
        total, low = np.zeros(shape), np.zeros(shape, np.float32)
        empty = Blend(total, np.zeros((B, H)), np.zeros((B, H), np.int64), low, low.copy())
        return replace(start(B, H, A), blend=empty)

    def due(self, state: ExecutorState) -> Bool[np.ndarray, " B"]:
        """Rows without a chunk, or ``every`` ticks after the observation of their newest plan."""
        return due(state, self.every)

    def reset(self, state: ExecutorState, rows: Bool[np.ndarray, " B"]) -> ExecutorState:
        """Forget all predictions of these rows."""
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
        return pop(state if plan is None else self._add(state, plan, rows, age))

    def disagreement(self, state: ExecutorState) -> Float32[np.ndarray, "B A"]:
        """Largest minus smallest prediction for the action just executed, physical units; 0 with fewer than two.

        Large compared with the spread of one plan means that the mean stands between two ways of doing the task.
        """
        blend, done = _blend(state), state.cursor - 1
        H = state.actions.shape[1]
        rows, at = np.arange(len(done)), np.clip(done, 0, H - 1)
        several = (done >= 0) & (done < H) & (blend.count[rows, at] > 1)
        return np.where(several[:, None], blend.high[rows, at] - blend.low[rows, at], np.float32(0))

    def _add(self, state: ExecutorState, plan: Chunk, rows: Bool[np.ndarray, " B"] | None, age: Age) -> ExecutorState:
        index, ages = arrivals(state, plan, rows, age)
        blend = _blend(state)
        old = _moved(blend, index, state.cursor[index], ages)
        a, ok = plan.actions, plan.valid
        each, all_ = ok[..., None], (old.count > 0)[..., None]
        # Plans come in the order of their queries, so the rank of a prediction is known when it arrives ("oldest"),
        # or moves every earlier one by one ("newest").
        if self.heaviest == "oldest":
            new, keep = np.exp(-self.m * old.count), np.ones(ok.shape)
        else:
            new, keep = np.ones(ok.shape), np.where(ok, np.exp(-self.m), 1.0)
        total = old.total * keep[..., None] + np.where(each, new[..., None] * a, 0.0)
        weight = old.weight * keep + np.where(ok, new, 0.0)
        count = old.count + ok
        low = np.where(each & (~all_ | (a < old.low)), a, old.low)
        high = np.where(each & (~all_ | (a > old.high)), a, old.high)
        fresh = count > 0
        mean = np.where(fresh[..., None], total / np.where(fresh, weight, 1.0)[..., None], a).astype(np.float32)
        parts = [getattr(blend, name).copy() for name in _NAMES]
        for part, value in zip(parts, (total, weight, count, low, high), strict=True):
            part[index] = value
        return replace(put(state, index, ages, mean, fresh), blend=Blend(*parts))


_NAMES = ("total", "weight", "count", "low", "high")


def _blend(state: ExecutorState) -> Blend:
    if state.blend is None:
        raise InputError("ensemble: expected a state made by Ensemble.start, got one of another executor")
    return state.blend


def _moved(
    blend: Blend, index: Int64[np.ndarray, " r"], cursor: Int64[np.ndarray, " r"], ages: Int64[np.ndarray, " r"]
) -> Blend:
    """The blends of rows ``index`` with index 0 at the observation of the new plan; nothing beyond their end."""
    H = blend.count.shape[1]
    at = np.arange(H) + (cursor - ages)[:, None]
    there = (cursor >= 0)[:, None] & (at < H)
    flat = index[:, None], np.clip(at, 0, H - 1)
    taken = [getattr(blend, name)[flat] for name in _NAMES]
    return Blend(*(np.where(there.reshape(there.shape + (1,) * (t.ndim - 2)), t, t.dtype.type(0)) for t in taken))
