"""Chunks -> one action per control tick. Pure: ``step(state, plan) -> (action, state)``, one row per environment.

Names: a chunk has H actions, k of them are executed before the next plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float32, Int64

from vola.errors import ConfigError, InputError
from vola.types import Chunk


@dataclass(frozen=True)
class ExecutorState:
    """The chunk in execution and how many of its actions are already out; a cursor of k means a plan is due."""

    actions: Float32[np.ndarray, "B H A"]
    cursor: Int64[np.ndarray, " B"]


@dataclass(frozen=True)
class Receding:
    """Receding horizon: execute k of H, then replan. k = H is open loop, k = 1 replans every tick."""

    k: int = 4

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"executor: expected k >= 1 executed steps, got {self.k}")

    def start(self, B: int, H: int, A: int) -> ExecutorState:
        """Before the first tick: every row is due for a plan.

        Raises:
            ConfigError: k > H, a chunk does not last that long.
        """
        if self.k > H:
            raise ConfigError(f"executor: expected k <= H, got k={self.k}, H={H}. Execute fewer steps or predict more.")
        return ExecutorState(np.zeros((B, H, A), np.float32), np.full(B, self.k))

    def due(self, state: ExecutorState) -> Bool[np.ndarray, " B"]:
        """Which rows need a fresh chunk before they can act."""
        return state.cursor >= self.k

    def reset(self, state: ExecutorState, rows: Bool[np.ndarray, " B"]) -> ExecutorState:
        """Forget the chunks of these rows: what an episode leaves behind never reaches the next one."""
        return replace(state, cursor=np.where(rows, self.k, state.cursor))

    def step(
        self, state: ExecutorState, plan: Chunk | None = None, rows: Bool[np.ndarray, " B"] | None = None
    ) -> tuple[Float32[np.ndarray, "B A"], ExecutorState]:
        """Take in the fresh chunks of ``rows`` (all rows if None), then pop one action per row.

        Raises:
            InputError: a row is due and got no chunk, or ``plan`` does not have one chunk per row of ``rows``.
        """
        if plan is not None:
            rows = np.ones(len(state.cursor), bool) if rows is None else rows
            if plan.actions.shape[0] != rows.sum() or plan.actions.shape[1:] != state.actions.shape[1:]:
                raise InputError(
                    f"plan: expected {rows.sum()} chunks of shape {state.actions.shape[1:]}, got {plan.actions.shape}"
                )
            actions, cursor = state.actions.copy(), state.cursor.copy()
            actions[rows], cursor[rows] = plan.actions, 0
            state = ExecutorState(actions, cursor)
        if (state.cursor >= self.k).any():
            late = np.flatnonzero(state.cursor >= self.k).tolist()
            raise InputError(f"executor: rows {late[:8]} have used up their chunk; plan for the rows in `due` first")
        action = state.actions[np.arange(len(state.cursor)), state.cursor]
        return action, replace(state, cursor=state.cursor + 1)
