"""Frames in which the robot is told to do nothing. Where they dominate, a policy learns to stand still."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vola.data.episodes import Dataset, check_selection
from vola.errors import ConfigError


def idle_frames(dataset: Dataset, episodes: Sequence[int], still: float = 0.01) -> dict[int, np.ndarray]:
    """Per episode number a bool array (L): True where no dimension of the action moves.

    Deltas and velocities move by their own magnitude; positions, grippers and dimensions of unknown kind by the
    difference to the frame before (so a frame in which only the gripper changes is not idle; the first frame of an
    episode is judged like the second). A dimension is still when it moves by at most ``still`` times the 99th
    percentile of its non-zero moves over these episodes.

    Raises:
        ConfigError: ``still`` outside [0, 1).
    """
    if not 0.0 <= still < 1.0:
        raise ConfigError(f"still: expected a share in [0, 1), got {still}")
    own = np.isin(dataset.spec.action.kinds, ("delta", "velocity"))
    moves = {}
    for episode in check_selection(dataset, episodes):
        action = dataset.column("action", episode.index).astype(np.float64)
        change = np.abs(np.diff(action, axis=0, prepend=action[:1]))
        change[0] = change[min(1, len(change) - 1)]
        moves[episode.index] = np.where(own, np.abs(action), change)
    pooled = np.concatenate(list(moves.values()))
    limit = np.zeros(pooled.shape[1])
    for d, column in enumerate(pooled.T):
        moving = column[column > 0]
        limit[d] = still * np.quantile(moving, 0.99) if moving.size else 0.0
    return {index: np.all(move <= limit, axis=1) for index, move in moves.items()}
