"""Error on demonstrations that training never saw, beside three baselines anyone gets for free.

All methods are measured on the same windows, those with two earlier frames, so that each baseline has what it needs:

    hold      a_{t-1} for every h                 the robot keeps the last command
    mean      the mean action of the training set
    linear    a_{t-1} + (h + 1) (a_{t-1} - a_{t-2})
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int64

from vola.data.windows import Windows
from vola.errors import InputError
from vola.policy import Policy

BEFORE = 2  # earlier actions that the baselines look at


@dataclass(frozen=True)
class HeldOutErrors:
    """Absolute errors in physical units, per method ``N H A``; which steps count; the episode of each window."""

    error: dict[str, Float[np.ndarray, "N H A"]]
    valid: Bool[np.ndarray, "N H"]
    episode: Int64[np.ndarray, " N"]


def held_out_errors(
    policy: Policy, windows: Windows, mean_action: Float[np.ndarray, " A"], *, noise_seed: int = 0, most: int = 2000
) -> HeldOutErrors:
    """Plan at up to ``most`` evenly spaced held-out windows (one sample each) and compare with what the human did.

    Steps of the chunk that no held-out episode is long enough to judge are left out.

    Raises:
        InputError: no window has two earlier frames.
    """
    usable = np.flatnonzero(windows.frame >= BEFORE)
    if len(usable) == 0:
        raise InputError(f"held-out episodes: expected some longer than {BEFORE} frames, got none")
    chosen = usable[np.unique(np.linspace(0, len(usable) - 1, min(most, len(usable))).round().astype(int))]
    parts: dict[str, list[np.ndarray]] = {"policy": [], "hold": [], "mean": [], "linear": []}
    valid, episode = [], []
    ahead = np.arange(1, policy.H + 1, dtype=np.float64)[:, None]
    for rows in np.array_split(chosen, -(-len(chosen) // 256)):
        batch = windows.batch(rows)
        rngs = [np.random.default_rng([noise_seed, e, f]) for e, f in zip(batch.episode, batch.frame, strict=True)]
        truth = batch.chunk.actions.astype(np.float64)
        earlier = [windows.dataset.column("action", int(e)) for e in batch.episode]
        last = np.stack([a[f - 1] for a, f in zip(earlier, batch.frame, strict=True)])[:, None].astype(np.float64)
        before = np.stack([a[f - 2] for a, f in zip(earlier, batch.frame, strict=True)])[:, None].astype(np.float64)
        answers = {
            "policy": policy.plan(batch.observation, rngs).actions,
            "hold": last,
            "mean": mean_action,
            "linear": last + ahead * (last - before),
        }
        for name, answer in answers.items():
            parts[name].append(np.abs(answer - truth))
        valid.append(batch.chunk.valid)
        episode.append(batch.episode)
    counts = np.concatenate(valid)
    reached = int(counts.any(axis=0).sum())  # valid steps are a prefix of the chunk
    error = {name: np.concatenate(p)[:, :reached] for name, p in parts.items()}
    return HeldOutErrors(error, counts[:, :reached], np.concatenate(episode))


def action_moments(windows: Windows) -> tuple[Float[np.ndarray, " A"], Float[np.ndarray, " A"]]:
    """Mean and standard deviation of the actions (physical units) of the windows' episodes; a dimension that never
    moves gets the deviation 1, so that it can be divided by."""
    actions = np.concatenate([windows.dataset.column("action", e.index) for e in windows.episodes]).astype(np.float64)
    std = actions.std(0)
    return actions.mean(0), np.where(std > 1e-6, std, 1.0)
