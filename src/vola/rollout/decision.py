"""The error probability of one decision: what ``theory.compounding`` calls eps(k), measured on a trained policy.

The expert drives to a random moment of the episode, the policy makes one plan there and k steps of it are executed,
then the expert takes over again. The expert always succeeds from where it can be done at all, so an episode that fails
was lost by that one decision.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from vola.envs.experts import LEFT, NEAR, RIGHT, Expert
from vola.envs.tabletop import Tabletop
from vola.envs.tasks import Detour
from vola.errors import ConfigError
from vola.theory.statistics import Rate
from vola.types import Planner, select

_MOMENT = 2  # third seed of the generators that draw moments, apart from those of the planner's noise


def decision_errors(table: Tabletop, seeds: Sequence[int], planner: Planner, k: int, noise_seed: int = 0) -> Rate:
    """Episodes lost by one decision of k steps, out of all.

    Each scene's moment is uniform over the steps of the expert's own episode and depends on its seed alone, as do the
    side the expert takes before it (Detour) and the planner's noise. Disturbances of the table stay on.

    Raises:
        ConfigError: a planner that looks at more than one frame, or k beyond its chunk.
    """
    if planner.observation_window != 1 or not 1 <= k <= planner.chunk_length:
        raise ConfigError(
            f"decision_errors: expected T = 1 and 1 <= k <= H, got T={planner.observation_window}, k={k}, "
            f"H={planner.chunk_length}"
        )
    lengths = _expert_lengths(table, seeds)
    rngs = [np.random.default_rng([noise_seed, int(s), _MOMENT]) for s in seeds]
    moment = np.array([int(g.integers(n)) for g, n in zip(rngs, lengths, strict=True)])
    sides = np.array([LEFT if g.random() < 0.5 else RIGHT for g in rngs])
    noise = [np.random.default_rng([noise_seed, int(s)]) for s in seeds]
    table.reset(np.asarray(seeds))
    chunks = np.zeros((len(seeds), planner.chunk_length, 2))
    tick = 0
    while not table.done.all():
        now = np.flatnonzero((moment == tick) & ~table.done)
        if len(now):
            made = planner.plan(select(table.observe(), now), [noise[int(i)] for i in now])
            chunks[now] = made.actions
        over = tick >= moment + k
        action = np.array(Expert(table, np.where(over, _nearer(table), sides)).act())
        own = np.flatnonzero((tick >= moment) & ~over)
        action[own] = chunks[own, tick - moment[own]]
        table.step(action)
        tick += 1
    return Rate(int((~table.success).sum()), len(seeds))


def _expert_lengths(table: Tabletop, seeds: Sequence[int]) -> Int[np.ndarray, " n"]:
    table.reset(np.asarray(seeds))
    expert = Expert(table)
    while not table.done.all():
        table.step(expert.act())
    return np.array(table.steps)


def _nearer(table: Tabletop) -> Int[np.ndarray, " n"]:
    """The side each robot is on now: going back to the other one could lose what is not lost."""
    if not isinstance(table.config.task, Detour):
        return np.full(table.n, NEAR)
    return np.where(table.world.robot[:, 0] < table.world.wall[:, 0], LEFT, RIGHT)
