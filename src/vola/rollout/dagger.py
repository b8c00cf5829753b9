"""What would the expert do at the states a policy visits? The data of DAgger's next round (Ross et al. 2011).

The policy drives with its own executor through seeded scenes, and the expert names its action at every step. Failed
episodes are kept: the states on the way to a failure are the ones that demonstrations lack. After a collision there
are no further steps. Training on these episodes is not done here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, UInt8

from vola.cite import Source
from vola.envs.experts import Expert, nearer_sides
from vola.envs.tabletop import CAMERA, StepResult, Tabletop
from vola.envs.tasks import Detour
from vola.errors import ConfigError, InputError
from vola.executor import Executor
from vola.rollout.collect import SIDE_BY_SIDE, Demonstration
from vola.rollout.latency import Latency
from vola.rollout.rollout import Rollouts, rollout
from vola.types import Observation, Planner

DAGGER = Source(
    "Ross, Gordon and Bagnell, A Reduction of Imitation Learning and Structured Prediction to No-Regret Online "
    "Learning, 2011",
    "algorithm 3.1",
    "beta: probability per step that the expert's action is executed instead of the policy's",
)
_MIXING = 2  # third seed of the generators that decide who drives, apart from those of planning and latency


@dataclass(frozen=True)
class Relabelled:
    """One episode that a policy drove: what it saw, and as ``demonstration.action`` what the expert would have done.

    success, failure: how it ended (see ``StepResult``). by_expert: ``L``, the steps in which the expert's action was
    executed.
    """

    demonstration: Demonstration
    success: bool
    failure: str
    by_expert: Bool[np.ndarray, " L"]


def relabel(
    table: Tabletop,
    seeds: Sequence[int],
    planner: Planner,
    execute: Executor,
    *,
    beta: float = 0.0,
    noise_seed: int = 0,
    whole: bool = False,
    latency: Latency | None = None,
) -> Iterator[Relabelled]:
    """Let a policy drive and ask the expert at every step; one episode per seed, in their order, failed ones included.

    Where both ways are good (``Detour``), the expert names the side the robot is on at that moment. It stays with a
    side until the robot is clearly on the other one (``nearer_sides``), so labels do not flicker about the middle and
    never send a robot through the wall to the side of its start. What an episode holds depends on its seed and
    ``noise_seed`` only, not on the other scenes.

    Args:
        table: the task and its disturbance; its scenes are replaced.
        beta: probability per step, drawn anew, that the expert's action is executed (``DAGGER``); the executor goes
            on as if its own had been.
        whole, latency: as in ``rollout``.

    Raises:
        InputError: no seeds. ConfigError: beta outside [0, 1], or an executor that does not fit the planner.
    """
    if not 0 <= beta <= 1:
        raise ConfigError(f"beta: expected a probability in [0, 1], got {beta!r}")
    if len(seeds) == 0:
        raise InputError("relabel: expected at least one seed, got none")
    return _parts(table, seeds, planner, execute, beta, noise_seed, whole, latency)


def _parts(
    table: Tabletop,
    seeds: Sequence[int],
    planner: Planner,
    execute: Executor,
    beta: float,
    noise_seed: int,
    whole: bool,
    latency: Latency | None,
) -> Iterator[Relabelled]:
    for start in range(0, len(seeds), SIDE_BY_SIDE):
        scenes = _Watched(table, beta, noise_seed)
        made = rollout(
            scenes, seeds[start : start + SIDE_BY_SIDE], planner, execute, name="visited", role="policy",
            task=table.config.task.name, noise_seed=noise_seed, whole=whole, latency=latency,
        )  # fmt: skip
        yield from scenes.episodes(made)


class _Watched:
    """A table whose every step is preceded by the expert's opinion; what ``rollout`` takes for its scenes."""

    def __init__(self, table: Tabletop, beta: float, noise_seed: int) -> None:
        self.spec, self._table, self._beta, self._noise_seed = table.spec, table, beta, noise_seed
        self._sides: np.ndarray | None = None
        self._seen: Observation | None = None

    @property
    def instructions(self) -> tuple[str, ...]:
        return self._table.instructions

    @property
    def done(self) -> Bool[np.ndarray, " n"]:
        return self._table.done

    def reset(self, seeds: np.ndarray) -> None:
        self._table.reset(seeds)
        n = self._table.n
        self._rngs = [np.random.default_rng([self._noise_seed, int(s), _MIXING]) for s in seeds]
        self._images: list[list[np.ndarray]] = [[] for _ in range(n)]
        self._states: list[list[np.ndarray]] = [[] for _ in range(n)]
        self._labels: list[list[np.ndarray]] = [[] for _ in range(n)]
        self._by_expert: list[list[bool]] = [[] for _ in range(n)]

    def observe(self) -> Observation:
        self._seen = self._table.observe()
        return self._seen

    def step(self, actions: Float32[np.ndarray, "n A"]) -> StepResult:
        table, open_ = self._table, np.flatnonzero(~self._table.done)
        labels, state = self._expert(), table.state
        pictures, actions = self._pictures(open_), actions.copy()
        for i, picture in zip(open_, pictures, strict=True):
            expert = bool(self._rngs[i].random() < self._beta)
            if expert:
                actions[i] = labels[i]
            self._images[i].append(picture)
            self._states[i].append(state[i])
            self._labels[i].append(labels[i])
            self._by_expert[i].append(expert)
        self._seen = None
        return table.step(actions)

    def render(self, size: int, rows: np.ndarray) -> UInt8[np.ndarray, "m Y X 3"]:
        return self._table.render(size, rows)

    def start_hash(self, i: int) -> str:
        return self._table.start_hash(i)

    def _expert(self) -> Float32[np.ndarray, "n A"]:
        if isinstance(self._table.config.task, Detour):
            self._sides = nearer_sides(self._table.world, self._sides)
        return Expert(self._table, self._sides).act().astype(np.float32)

    def _pictures(self, rows: np.ndarray) -> UInt8[np.ndarray, "m Y X 3"]:
        """Painted once per step, also where the planner has just looked."""
        if self._seen is None:
            return self._table.render(rows=rows)
        return self._seen.images[CAMERA][rows, 0].transpose(0, 2, 3, 1)

    def episodes(self, made: Rollouts) -> Iterator[Relabelled]:
        for i, episode in enumerate(made.episodes):
            pictures, states, labels = (np.stack(x[i]) for x in (self._images, self._states, self._labels))
            demonstration = Demonstration(episode.seed, {CAMERA: pictures}, states, labels, episode.instruction)
            yield Relabelled(demonstration, episode.success, episode.failure, np.array(self._by_expert[i]))
