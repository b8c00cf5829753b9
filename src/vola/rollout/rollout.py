"""Closed loop: many seeded scenes at once, one planner, one executor, and a record of every episode.

Scene i starts from ``seeds[i]`` and its planner noise comes from a generator of its own, seeded by (noise_seed,
seeds[i]); neither depends on how many scenes run side by side.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from jaxtyping import Bool, Float32, UInt8

from vola.errors import InputError
from vola.executor import Receding
from vola.theory.statistics import Rate
from vola.types import Chunk, Observation, Planner, RobotSpec, select

Role = Literal["policy", "baseline", "expert"]


class StepOutcome(Protocol):
    """What an environment says after a step, one entry per scene; a finished scene keeps its entry."""

    @property
    def terminated(self) -> Bool[np.ndarray, " n"]: ...

    @property
    def truncated(self) -> Bool[np.ndarray, " n"]: ...

    @property
    def success(self) -> Bool[np.ndarray, " n"]: ...

    @property
    def failure(self) -> np.ndarray: ...


class Scenes(Protocol):
    """n scenes that move together (``vola.envs.tabletop.Tabletop`` is one). Finished scenes stand still."""

    spec: RobotSpec

    @property
    def instructions(self) -> tuple[str, ...]: ...

    @property
    def done(self) -> Bool[np.ndarray, " n"]: ...

    def reset(self, seeds: np.ndarray) -> Any: ...

    def observe(self) -> Observation: ...

    def step(self, actions: Float32[np.ndarray, "n A"]) -> StepOutcome: ...

    def render(self, size: int, rows: np.ndarray) -> UInt8[np.ndarray, "m Y X 3"]: ...

    def start_hash(self, i: int) -> str: ...


@dataclass(frozen=True)
class EpisodeResult:
    """One evaluated episode; the columns of ``rollouts.parquet``. ``length`` counts control steps, ``plan_ms`` is the
    mean time of one plan for this scene in milliseconds (a batched plan divided by its scenes; NaN: not measured),
    ``failure`` is "" on success."""

    policy: str
    role: Role
    task: str
    instruction: str
    seed: int
    start_hash: str
    success: bool
    length: int
    plan_ms: float
    failure: str


@dataclass(frozen=True)
class Rollouts:
    """All episodes of one planner, and the frames of the filmed ones by their place in ``episodes``."""

    episodes: tuple[EpisodeResult, ...]
    films: dict[int, UInt8[np.ndarray, "L Y X 3"]]

    @property
    def rate(self) -> Rate:
        """Successes out of episodes; ``theory.statistics.wilson`` gives its interval."""
        return Rate(sum(e.success for e in self.episodes), len(self.episodes))


def rollout(
    scenes: Scenes,
    seeds: Sequence[int],
    planner: Planner,
    execute: Receding,
    *,
    name: str,
    role: Role,
    task: str,
    noise_seed: int = 0,
    whole: bool = False,
    film: Sequence[int] = (),
    film_size: int = 256,
) -> Rollouts:
    """Run one episode per seed and return what happened.

    Args:
        execute: how chunks become actions; ``planner`` is asked only for the scenes that are due and not finished.
        whole: plan for all scenes at once, finished ones too: what an expert that is bound to ``scenes`` needs.
        film: which episodes (places in ``seeds``) to film, ``film_size`` pixels square, first frame = start state.

    Raises:
        InputError: no seeds. ConfigError: ``execute`` needs longer chunks than the planner makes.
    """
    if len(seeds) == 0 or any(not 0 <= i < len(seeds) for i in film):
        raise InputError(f"rollout: expected at least one seed and films of those, got {len(seeds)} seeds, film={film}")
    scenes.reset(np.asarray(seeds))
    n, filmed = len(seeds), np.asarray(film, dtype=np.int64)
    rngs = [np.random.default_rng([noise_seed, int(seed)]) for seed in seeds]
    state = execute.start(n, planner.chunk_length, scenes.spec.action.size)
    window = _Window(planner.observation_window)
    length, spent, plans = np.zeros(n, np.int64), np.zeros(n), np.zeros(n)
    success, failure = np.zeros(n, bool), np.full(n, "", dtype=object)
    films = {int(i): [frame] for i, frame in zip(filmed, _frames(scenes, filmed, film_size), strict=True)}
    while not scenes.done.all():
        open_ = ~scenes.done
        plan, rows = None, execute.due(state)
        if (rows & open_).any() or window.T > 1:
            observation = window.push(scenes.observe())
        if (rows & open_).any():
            plan, took = _plan(planner, observation, rows, rows & open_, rngs, whole)
            spent[rows & open_] += took / (rows & open_).sum()
            plans[rows & open_] += 1
        elif rows.any():
            plan = _idle(int(rows.sum()), planner.chunk_length, scenes.spec.action.size)
        actions, state = execute.step(state, plan, rows)
        outcome = scenes.step(actions)
        length += open_
        success, failure = outcome.success, outcome.failure
        for i in filmed[open_[filmed]]:
            films[int(i)].append(_frames(scenes, np.array([i]), film_size)[0])
    episodes = tuple(
        EpisodeResult(
            name, role, task, scenes.instructions[i], int(seeds[i]), scenes.start_hash(i), bool(success[i]),
            int(length[i]), float(1e3 * spent[i] / max(plans[i], 1)), "" if success[i] else str(failure[i]),
        )
        for i in range(n)
    )  # fmt: skip
    return Rollouts(episodes, {i: np.stack(frames) for i, frames in films.items()})


def _frames(scenes: Scenes, rows: np.ndarray, size: int) -> np.ndarray:
    return scenes.render(size, rows) if len(rows) else np.zeros((0, size, size, 3), np.uint8)


def _idle(rows: int, H: int, A: int) -> Chunk:
    """Chunks for finished scenes, which ignore them."""
    return Chunk(np.zeros((rows, H, A), np.float32), np.ones((rows, H), bool))


def _plan(
    planner: Planner,
    observation: Observation,
    rows: Bool[np.ndarray, " n"],
    active: Bool[np.ndarray, " n"],
    rngs: Sequence[np.random.Generator],
    whole: bool,
) -> tuple[Chunk, float]:
    """Chunks for ``rows``, real ones where ``active`` and idle ones elsewhere, and the seconds the planner took."""
    chosen = np.flatnonzero(active)
    start = time.perf_counter()
    if whole:
        made = planner.plan(observation, rngs).actions[chosen]
    else:
        made = planner.plan(select(observation, chosen), [rngs[int(i)] for i in chosen]).actions
    took = time.perf_counter() - start
    chunk = _idle(int(rows.sum()), made.shape[1], made.shape[2])
    chunk.actions[active[rows]] = made
    return chunk, took


class _Window:
    """The last T observations as one; frames before the start are invalid."""

    def __init__(self, T: int) -> None:
        self.T = T
        self._past: Observation | None = None

    def push(self, now: Observation) -> Observation:
        if self.T == 1:
            return now
        past = self._past = _shift(self._past, now, self.T)
        return past


def _shift(past: Observation | None, now: Observation, T: int) -> Observation:
    def join(old: np.ndarray | None, new: np.ndarray) -> np.ndarray:
        if old is None:
            old = np.zeros((new.shape[0], T, *new.shape[2:]), new.dtype)
        return np.concatenate([old[:, 1:], new], axis=1)

    return replace(
        now,
        images={k: join(past.images[k] if past else None, v) for k, v in now.images.items()},
        images_valid={k: join(past.images_valid[k] if past else None, v) for k, v in now.images_valid.items()},
        state=join(past.state if past else None, now.state),
        state_valid=join(past.state_valid if past else None, now.state_valid),
    )
