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
from jaxtyping import Bool, Float32, Int64, UInt8

from vola.errors import InputError
from vola.executor import Executor, ExecutorState
from vola.rollout.latency import Latency
from vola.theory.statistics import Rate
from vola.types import Chunk, Guide, Observation, Planner, RobotSpec, pick, select

Role = Literal["policy", "baseline", "expert"]
_LATENCY = 1  # third seed of the generators of latency, so that they are not those of the planner's noise


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
    ``failure`` is "" on success. ``malformed`` counts plans whose tokens did not decode, ``starved`` ticks without a
    fresh action: the last one was repeated, because the plan left the step open or the next plan was not here yet."""

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
    malformed: int = 0
    starved: int = 0


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
    execute: Executor,
    *,
    name: str,
    role: Role,
    task: str,
    noise_seed: int = 0,
    whole: bool = False,
    film: Sequence[int] = (),
    film_size: int = 256,
    latency: Latency | None = None,
) -> Rollouts:
    """Run one episode per seed and return what happened.

    Args:
        execute: how chunks become actions; ``planner`` is asked only for the scenes that are due and not finished.
        whole: plan for all scenes at once, finished ones too: what an expert that is bound to ``scenes`` needs.
        film: which episodes (places in ``seeds``) to film, ``film_size`` pixels square, first frame = start state.
        latency: ticks until a plan arrives while the scenes go on with what ``execute`` has; None: the scenes stand
            still while planning. Either way they stand still for the **first** plan of an episode, as a robot
            waits before it starts. One plan per scene is on its way at a time; the next is asked for in the tick
            after it landed at the earliest. Latencies are drawn per scene and do not depend on the batch.

    Raises:
        InputError: no seeds. ConfigError: ``execute`` needs longer chunks than the planner makes, or guides a planner
            that cannot be guided.
    """
    if len(seeds) == 0 or any(not 0 <= i < len(seeds) for i in film):
        raise InputError(f"rollout: expected at least one seed and films of those, got {len(seeds)} seeds, film={film}")
    scenes.reset(np.asarray(seeds))
    n, filmed = len(seeds), np.asarray(film, dtype=np.int64)
    rngs = [np.random.default_rng([noise_seed, int(seed)]) for seed in seeds]
    state = execute.start(n, planner.chunk_length, scenes.spec.action.size)
    flight = _Flight(latency, [np.random.default_rng([noise_seed, int(seed), _LATENCY]) for seed in seeds])
    window, counts, tick = _Window(planner.observation_window), _Counts(n), 0
    films = {int(i): [frame] for i, frame in zip(filmed, _frames(scenes, filmed, film_size), strict=True)}
    while not scenes.done.all():
        open_ = ~scenes.done
        asked = execute.due(state) & open_ & ~flight.pending
        if asked.any() or window.T > 1:
            observation = window.push(scenes.observe())
        if asked.any():
            rows = np.ones(n, bool) if whole else asked
            start = time.perf_counter()
            made = pick(_plan(planner, observation, rows, rngs, execute.guide(state, rows)), asked[rows])
            counts.planned(asked, time.perf_counter() - start, made)
            flight.send(tick, asked, made)
        arrived, age, plan = flight.land(tick, (state.cursor < 0) & ~open_, state.actions.shape[1:])
        actions, state = execute.step(state, plan, arrived, age)
        counts.stepped(open_, scenes.step(actions), state)
        tick += 1
        for i in filmed[open_[filmed]]:
            films[int(i)].append(_frames(scenes, np.array([i]), film_size)[0])
    episodes = tuple(counts.episode(i, name, role, task, scenes, int(seeds[i])) for i in range(n))
    return Rollouts(episodes, {i: np.stack(frames) for i, frames in films.items()})


def _frames(scenes: Scenes, rows: np.ndarray, size: int) -> np.ndarray:
    return scenes.render(size, rows) if len(rows) else np.zeros((0, size, size, 3), np.uint8)


def _plan(
    planner: Planner,
    observation: Observation,
    rows: Bool[np.ndarray, " n"],
    rngs: Sequence[np.random.Generator],
    guide: Guide | None,
) -> Chunk:
    """Chunks for ``rows``."""
    chosen = np.flatnonzero(rows)
    seen, own = select(observation, chosen), [rngs[int(i)] for i in chosen]
    return planner.plan(seen, own) if guide is None else planner.plan(seen, own, guide=guide)


class _Flight:
    """Plans on their way, at most one per scene: when they were asked for, when they land, what they say."""

    def __init__(self, latency: Latency | None, rngs: Sequence[np.random.Generator]) -> None:
        n = len(rngs)
        self._latency, self._rngs = latency or Latency(0), rngs
        self._asked, self._lands = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._acted = np.zeros(n, bool)
        self._actions: np.ndarray | None = None
        self._valid: np.ndarray | None = None
        self.pending = np.zeros(n, bool)

    def send(self, tick: int, rows: np.ndarray, plan: Chunk) -> None:
        if self._actions is None or self._valid is None:
            n = len(rows)
            self._actions = np.zeros((n, *plan.actions.shape[1:]), np.float32)
            self._valid = np.zeros((n, *plan.valid.shape[1:]), bool)
        self._actions[rows], self._valid[rows] = plan.actions, plan.valid
        # The first plan of an episode is waited for, and nothing is drawn for it.
        late = [self._latency.draw(self._rngs[int(i)]) if self._acted[i] else 0 for i in np.flatnonzero(rows)]
        self._asked[rows], self._lands[rows] = tick, tick + np.array(late, np.int64)
        self._acted |= rows
        self.pending = self.pending | rows

    def land(
        self, tick: int, idle: np.ndarray, shape: tuple[int, ...]
    ) -> tuple[Bool[np.ndarray, " n"], Int64[np.ndarray, " r"], Chunk | None]:
        """Rows whose plan is here now, the ages of these plans, and the plans. ``idle``: scenes that were finished
        before they began; they get zeros, which they ignore."""
        here = self.pending & (self._lands <= tick)
        self.pending = self.pending & ~here
        rows = here | idle
        age = np.where(here, tick - self._asked, 0)[rows]
        if not rows.any():
            return rows, age, None
        actions, valid = np.zeros((len(rows), *shape), np.float32), np.zeros((len(rows), shape[0]), bool)
        if self._actions is not None and self._valid is not None:
            actions[here], valid[here] = self._actions[here], self._valid[here]
        return rows, age, Chunk(actions[rows], valid[rows])


class _Counts:
    """What becomes of an episode and of its plans, one entry per scene."""

    def __init__(self, n: int) -> None:
        self._spent, self._plans, self._length = np.zeros(n), np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._malformed, self._starved = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._success, self._failure = np.zeros(n, bool), np.full(n, "", dtype=object)

    def planned(self, asked: np.ndarray, seconds: float, plan: Chunk) -> None:
        """One plan for each scene that asked, ``seconds`` for all together."""
        self._spent[asked] += seconds / asked.sum()
        self._plans[asked] += 1
        if plan.malformed is not None:
            self._malformed[asked] += plan.malformed

    def stepped(self, open_: np.ndarray, outcome: StepOutcome, state: ExecutorState) -> None:
        self._length += open_
        self._starved[open_] = (state.held + state.starved)[open_]
        self._success, self._failure = outcome.success, outcome.failure

    def episode(self, i: int, name: str, role: Role, task: str, scenes: Scenes, seed: int) -> EpisodeResult:
        plan_ms = float(1e3 * self._spent[i] / self._plans[i]) if self._plans[i] else float("nan")
        success = bool(self._success[i])
        return EpisodeResult(
            name, role, task, scenes.instructions[i], seed, scenes.start_hash(i), success, int(self._length[i]),
            plan_ms, "" if success else str(self._failure[i]), int(self._malformed[i]), int(self._starved[i]),
        )  # fmt: skip


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
