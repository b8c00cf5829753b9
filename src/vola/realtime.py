"""Real-time chunking: the next plan is made while the chunk is executed, and continues it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, final, get_args

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from vola.cite import Source
from vola.errors import ConfigError, InputError, expect_positive
from vola.executor import Age, ExecutorState, due, pop, reset, start, succeed
from vola.types import Chunk, Guide

Schedule = Literal["exponential", "linear", "ones", "zeros"]
Method = Literal["vjp", "identity", "prefix"]


@final
@dataclass(frozen=True)
class RealTime:
    """Ask for the next plan when k ticks of the chunk are over, guided by its rest; take it in at index ``age``.

    delay: ticks a plan is expected to take. It only shapes the weights of the guidance; the splice goes by the age
        the plan really has.
    schedule: how the weights fall from the end of the delay to the end of the old chunk (``guidance_weights``).
    method, limit: how a flow head follows the guide and the largest gain, see ``vola.types.Guide``. 5 is the
        authors' beta_max; LeRobot uses "identity" with 10 and the linear schedule.
    """

    k: int = 4
    delay: int = 0
    schedule: Schedule = "exponential"
    method: Method = "vjp"
    limit: float = 5.0

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Black et al., Real-Time Execution of Action Chunking Flow Policies, 2025",
            "eq. 5 and algorithm 1",
            "tau = 0 is noise, as in the paper; k = executed steps at the query, delay = inference delay in ticks",
            "https://arxiv.org/abs/2506.07339",
        ),
    )

    def __post_init__(self) -> None:
        expect_positive("real-time chunking", k=self.k)
        if isinstance(self.delay, bool) or not isinstance(self.delay, int) or self.delay < 0:
            raise ConfigError(f"real-time chunking: expected delay >= 0 (a whole number of ticks), got {self.delay!r}")
        for name, choices in (("schedule", Schedule), ("method", Method)):
            if getattr(self, name) not in get_args(choices):
                got = getattr(self, name)
                raise ConfigError(f"real-time chunking: expected a {name} out of {get_args(choices)}, got {got!r}")
        if isinstance(self.limit, bool) or not isinstance(self.limit, int | float) or not 0 < self.limit < math.inf:
            raise ConfigError(f"real-time chunking: expected a finite limit > 0, got {self.limit!r}")

    def start(self, B: int, H: int, A: int) -> ExecutorState:
        """Before the first tick. Raises ConfigError: k + delay > H, the chunk ends before the next plan is here."""
        if self.k + self.delay > H:
            raise ConfigError(
                f"real-time chunking: expected k + delay <= H, got k={self.k}, delay={self.delay}, H={H}. "
                "Ask earlier, plan faster or predict more."
            )
        return start(B, H, A)

    def due(self, state: ExecutorState) -> Bool[np.ndarray, " B"]:
        """Rows without a chunk, or k ticks after the observation of their newest plan."""
        return due(state, self.k)

    def reset(self, state: ExecutorState, rows: Bool[np.ndarray, " B"]) -> ExecutorState:
        """Forget the chunks of these rows; their next plan is free."""
        return reset(state, rows)

    def guide(self, state: ExecutorState, rows: Bool[np.ndarray, " B"]) -> Guide:
        """The rest of the chunk in execution of the r rows in ``rows``: actions ``r H A``, weights ``r H``.

        Rows without a chunk get weights of 0. Steps that the old plan left undecided are free, except during the
        delay, when what will be executed is known all the same.
        """
        H = state.actions.shape[1]
        index = np.flatnonzero(rows)
        cursor = state.cursor[index]
        left = np.where(cursor < 0, 0, np.maximum(H - cursor, 0))
        delay = np.minimum(self.delay, left)
        at = np.clip(cursor, 0, H)[:, None] + np.arange(H)
        flat = index[:, None], np.minimum(at, H - 1)
        weights = guidance_weights(delay, left, H, self.schedule)
        known = state.fresh[flat] | (np.arange(H) < delay[:, None])
        weights = np.where(known, weights, 0.0).astype(np.float32)
        actions = np.where(weights[..., None] > 0, state.actions[flat], np.float32(0))
        return Guide(actions, weights, delay, self.method, float(self.limit))

    def step(
        self,
        state: ExecutorState,
        plan: Chunk | None = None,
        rows: Bool[np.ndarray, " B"] | None = None,
        age: Age = 0,
    ) -> tuple[Float32[np.ndarray, "B A"], ExecutorState]:
        """See ``Executor.step``."""
        return pop(state if plan is None else succeed(state, plan, rows, age))


def guidance_weights(
    delay: Int64[np.ndarray, " B"], end: Int64[np.ndarray, " B"], H: int, schedule: Schedule = "exponential"
) -> Float64[np.ndarray, "B H"]:
    """How strongly each step of a new chunk is tied to the old one.

    ``delay``: steps that are executed anyway; ``end``: how many steps the old chunk still has (H - executed ones).
    A delay beyond the end is lowered to it.
    linear:       w_i = clip(1 + (delay - 1 - i) / (end - delay + 1), 0, 1), 0 for i >= end
    exponential:  w_i (e^{w_i} - 1) / (e - 1) of the linear w_i
    ones: 1 for i < end.   zeros: 1 for i < delay.
    Source: Black et al., 2025, eq. 5, and its code; delay 2, end 6: 1, 1, 4/5, 3/5, 2/5, 1/5, 0, ...

    Raises:
        InputError: a negative delay or end, an end beyond H, another schedule.
    """
    delay, end = np.asarray(delay), np.asarray(end)
    if schedule not in get_args(Schedule) or (delay < 0).any() or (end < 0).any() or (end > H).any():
        raise InputError(
            f"guidance_weights: expected delay >= 0, 0 <= end <= H={H}, schedule out of {get_args(Schedule)}, "
            f"got delay={delay!r:.60}, end={end!r:.60}, schedule={schedule!r}"
        )
    i, first, stop = np.arange(H), np.minimum(delay, end)[..., None], end[..., None]
    if schedule == "ones":
        return (i < stop).astype(np.float64)
    if schedule == "zeros":
        return (i < first).astype(np.float64)
    w = np.clip(1 + (first - 1 - i) / (stop - first + 1), 0, 1) * (i < stop)
    return w if schedule == "linear" else w * np.expm1(w) / np.expm1(1)
