"""Tabletop: language-conditioned 2-D tasks for many scenes at once, in numpy, rendered on demand.

    table = make_tabletop("vola/Detour-v0", noise=0.15)
    table.reset(np.arange(64))
    while not table.done.all():
        result = table.step(actions)        # 64 x 2, metres
        pictures = table.render()           # 64 x 48 x 48 x 3, only when somebody looks

A scene and all its disturbances depend on its seed alone: not on the batch it runs in, nor on what ran before, nor on
the actions. Two policies evaluated on the same seeds therefore meet the same noise (common random numbers).
``vola.envs.gym_env`` wraps this core for Gymnasium.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, UInt8

from vola.envs.chase import Chase
from vola.envs.insert import Insert
from vola.envs.painting import paint
from vola.envs.scene import Scene, World
from vola.envs.tasks import Compose, Detour, Push
from vola.errors import ConfigError, InputError, expect_shape
from vola.types import ActionSpec, CameraSpec, Observation, RobotSpec

RATE = 10.0  # Hz, control steps per second
CAMERA = "top"
AnyTask = Detour | Push | Compose | Insert | Chase


@dataclass(frozen=True)
class TabletopConfig:
    """A task and everything around it.

    task: geometry, speed, time limit, distractors (see vola.envs.tasks, insert and chase).
    image_size: rows and columns of the camera "top".
    noise: standard deviation of the execution noise per axis and step, as a fraction of ``task.speed``.
    kick_probability, kick_size: chance per step of an extra shove of the robot in a random direction, and its
        length (m).
    """

    task: AnyTask
    image_size: int = 48
    noise: float = 0.0
    kick_probability: float = 0.0
    kick_size: float = 0.2

    def __post_init__(self) -> None:
        if not isinstance(self.image_size, int) or self.image_size < 8:
            raise ConfigError(f"image_size: expected a whole number of at least 8 pixels, got {self.image_size!r}")
        # The upper bounds keep one substep of the physics shorter than a wall is thick.
        for name, most in (("noise", 2.0), ("kick_probability", 1.0), ("kick_size", 0.5)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(f"{name}: expected 0 .. {most:g}, got {getattr(self, name)!r}")


# The wind leaves no time to change one's mind, and the kicks none to look away: a policy that draws its side anew in
# every plan succeeds most often at an interior k, which moves down as kick_probability (the knob) goes up. Expert:
# 2000 of 2000 scenes on the nearer side, 1999 and 2000 when sent right and left (tests/envs/test_new_tasks.py).
GUST = Detour(
    time_limit=50, wall_half_width=0.25, wall_half_height=0.08, wall_jitter=(0.15, 0.05), start_x=0.12,
    start_y=(0.75, 0.85), wind=0.10,
)  # fmt: skip
TASKS: dict[str, TabletopConfig] = {
    "vola/Detour-v0": TabletopConfig(Detour()),
    "vola/Push-v0": TabletopConfig(Push()),
    "vola/Compose-v0": TabletopConfig(Compose()),
    "vola/Insert-v0": TabletopConfig(Insert()),
    "vola/Chase-v0": TabletopConfig(Chase()),
    "vola/Gust-v0": TabletopConfig(GUST, kick_probability=0.2, kick_size=0.12),
}


@dataclass(frozen=True)
class StepResult:
    """What a step did to each of the n scenes; a finished scene keeps its result.

    state: in the units of ``spec.state``. terminated: success, or a failure that ends the episode. truncated: the
    time is over without success. failure: "" or one of ``vola.envs.scene.FAILURES``. measure: see
    ``Tabletop.measure``.
    """

    state: Float32[np.ndarray, "n S"]
    terminated: Bool[np.ndarray, " n"]
    truncated: Bool[np.ndarray, " n"]
    success: Bool[np.ndarray, " n"]
    failure: np.ndarray
    measure: Float[np.ndarray, " n"]


class Tabletop:
    """n scenes of one task. ``reset`` decides n; ``step`` moves the scenes that are not done; ``render`` paints."""

    def __init__(self, config: TabletopConfig) -> None:
        self.config = config
        camera = CameraSpec(CAMERA, config.image_size, config.image_size)
        kind = config.task.action_kind
        action = ActionSpec(("dx", "dy") if kind == "delta" else ("x", "y"), ("m", "m"), (kind, kind), RATE)
        self.spec = RobotSpec((camera,), config.task.state_spec, action)
        self._world: World | None = None
        self._scenes: list[Scene] = []
        self.seeds = np.zeros(0, np.int64)
        self.steps = np.zeros(0, np.int64)
        self.terminated = self.truncated = self.success = np.zeros(0, bool)
        self.failure = np.zeros(0, "<U12")
        self._pushes = np.zeros((0, config.task.time_limit, 2))

    @property
    def n(self) -> int:
        """Number of scenes."""
        return len(self.seeds)

    @property
    def world(self) -> World:
        """Where everything is now: privileged knowledge, for experts and analyses.

        Raises:
            InputError: before the first reset.
        """
        if self._world is None:
            raise InputError("Tabletop: expected reset(seeds) before anything else, got no scene yet")
        return self._world

    @property
    def start(self) -> World:
        """Where everything was when the episodes started."""
        return World.of(self._scenes)

    @property
    def instructions(self) -> tuple[str, ...]:
        """The n sentences."""
        return tuple(s.instruction for s in self._scenes)

    @property
    def done(self) -> Bool[np.ndarray, " n"]:
        """Which scenes are finished (they do not move any more)."""
        return self.terminated | self.truncated

    @property
    def state(self) -> Float32[np.ndarray, "n S"]:
        """The robots' sensors now, in the units of ``spec.state``."""
        return self.config.task.state(self.world)

    @property
    def measure(self) -> Float[np.ndarray, " n"]:
        """How far off (m) each scene is: distance from the goal, for Insert the signed error where it crossed the
        plate. NaN: not known (Insert before it crosses). After an episode it gives its success at any tolerance."""
        return self.config.task.measure(self.world)

    def reset(
        self, seeds: Int[np.ndarray, " m"] | Sequence[int], rows: Int[np.ndarray, " m"] | None = None
    ) -> Float32[np.ndarray, "n S"]:
        """Start the scenes of these seeds and return the state of all n.

        rows: replace only these scenes (one seed each) and leave the others as they are; default: all, n = len(seeds).

        Raises:
            InputError: seeds that are not integers >= 0, or rows that do not fit.
        """
        seeds = _checked_seeds(seeds)
        scenes = [self.config.task.draw(np.random.default_rng([int(s), 0])) for s in seeds]
        pushes = np.stack([self._disturbance(int(s)) for s in seeds])
        world = World.of(scenes)
        if rows is None:
            n = len(seeds)
            self._world, self._scenes, self._pushes, self.seeds = world, scenes, pushes, seeds
            self.steps, self.failure = np.zeros(n, np.int64), np.zeros(n, "<U12")
            self.terminated, self.truncated, self.success = (np.zeros(n, bool) for _ in range(3))
            return self.state
        rows = np.asarray(rows, np.int64)
        if rows.shape != seeds.shape or (rows < 0).any() or (rows >= self.n).any() or len(set(rows)) < len(rows):
            raise InputError(f"rows: expected {len(seeds)} different indices below n={self.n}, got {rows.tolist()}")
        self.world.put(rows, world)
        for row, scene in zip(rows, scenes, strict=True):
            self._scenes[row] = scene
        self.seeds[rows], self._pushes[rows], self.steps[rows], self.failure[rows] = seeds, pushes, 0, ""
        self.terminated[rows] = self.truncated[rows] = self.success[rows] = False
        return self.state

    def _disturbance(self, seed: int) -> Float[np.ndarray, "time_limit 2"]:
        """What is added to the displacement (m) in every step of one episode.

        Noise and kicks have streams of their own: the scene is the same with and without them, the kicks with and
        without noise, and a longer time limit only appends.
        """
        c, T = self.config, self.config.task.time_limit
        push = np.zeros((T, 2))
        if c.noise > 0:
            push += np.random.default_rng([seed, 1]).standard_normal((T, 2)) * (c.noise * c.task.speed)
        if c.kick_probability > 0:
            chance, turn = np.random.default_rng([seed, 2]).random((T, 2)).T
            kick = c.kick_size * np.stack([np.cos(2 * np.pi * turn), np.sin(2 * np.pi * turn)], axis=1)
            push += np.where(chance[:, None] < c.kick_probability, kick, 0.0)
        return push

    def step(self, actions: Float[np.ndarray, "n 2"]) -> StepResult:
        """Move every unfinished scene by one control step (0.1 s). Nothing is painted.

        actions: displacement (m), or for tasks with "position" actions the place to go to (m, clipped to the table).
        A way longer than ``task.speed`` is shortened to it. Rows of finished scenes are ignored.

        Raises:
            InputError: wrong shape, or a number that is not finite in an unfinished scene.
        """
        task, world = self.config.task, self.world
        actions = np.asarray(actions, np.float64)
        expect_shape("actions", actions, "n 2", n=self.n)
        rows = np.flatnonzero(~self.done)
        move = actions[rows]
        bad = ~np.isfinite(move).all(axis=1)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise InputError(
                f"actions: expected finite numbers in metres, got {move[i].tolist()} for scene {int(rows[i])}. "
                "A policy that diverged is the usual reason."
            )
        if len(rows):
            if task.action_kind == "position":
                move = np.clip(move, -1, 1) - world.robot[rows]
            length = np.sqrt(move[:, 0] ** 2 + move[:, 1] ** 2)
            move = move * (task.speed / np.maximum(length, task.speed))[:, None]
            hit = task.advance(world, rows, move + self._pushes[rows, self.steps[rows]])
            self.steps[rows] += 1
            self._judge(rows, hit)
        return StepResult(
            self.state, self.terminated.copy(), self.truncated.copy(), self.success.copy(), self.failure.copy(),
            self.measure,
        )  # fmt: skip

    def _judge(self, rows: np.ndarray, hit: np.ndarray) -> None:
        """Record which of the scenes that just moved are finished, and how."""
        task = self.config.task
        over = self.steps[rows] >= task.time_limit
        success = task.reached(self.world.take(rows)) & ~hit
        if task.judged_at_end:
            success &= over
        late = rows[over & ~success & ~hit]
        self.success[rows] = success
        self.terminated[rows] = success | hit
        self.truncated[late] = True
        if hit.any():
            self.failure[rows[hit]] = task.crash(self.world.take(rows[hit]))
        if len(late):
            self.failure[late] = task.mistake(self.world.take(late))

    def render(
        self, size: int | None = None, rows: Int[np.ndarray, " m"] | None = None
    ) -> UInt8[np.ndarray, "m Y X 3"]:
        """Pictures of the scenes (``rows`` of them, or all) as they are now; default size ``image_size``."""
        world = self.world if rows is None else self.world.take(np.asarray(rows))
        return paint(self.config.task.sprites(world), len(world.robot), size or self.config.image_size)

    def observe(self) -> Observation:
        """What a policy sees now: B = n, T = 1, camera "top". Paints, so call it only when a plan is due."""
        n = self.n
        image = np.ascontiguousarray(self.render().transpose(0, 3, 1, 2))[:, None]
        ones = np.ones((n, 1), bool)
        return Observation({CAMERA: image}, {CAMERA: ones}, self.state[:, None], ones.copy(), self.instructions)

    def start_hash(self, i: int) -> str:
        """12 hexadecimal digits that identify the start of scene i: everything in it and its instruction."""
        return self._scenes[i].hash


def make_tabletop(env_id: str, **overrides: Any) -> Tabletop:
    """The environment of an id: one of ``TASKS``, "vola/Detour-v0" for instance.

    overrides: fields of ``TabletopConfig`` or of the task, e.g. ``noise=0.3, wall_half_width=0.35``.

    Raises:
        ConfigError: unknown id or field (with the nearest match), or values that do not fit.
    """
    if env_id not in TASKS:
        raise ConfigError(f"env_id: expected one of {', '.join(TASKS)}, got {env_id!r}.{_nearest(env_id, TASKS)}")
    preset = TASKS[env_id]
    task = preset.task
    outer = {f.name for f in fields(TabletopConfig)} - {"task"}
    inner = {f.name for f in fields(task)}
    for name in overrides:
        if name not in outer | inner:
            raise ConfigError(
                f"{env_id}: expected settings among {', '.join(sorted(outer | inner))}, got {name!r}."
                f"{_nearest(name, outer | inner)}"
            )
    task = replace(task, **{k: v for k, v in overrides.items() if k in inner})
    return Tabletop(replace(preset, task=task, **{k: v for k, v in overrides.items() if k in outer}))


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.4)
    return f" Did you mean {close[0]!r}?" if close else ""


def _checked_seeds(seeds: Any) -> np.ndarray:
    array = np.asarray(seeds)
    if array.ndim != 1 or array.dtype.kind not in "iu" or len(array) == 0 or (array < 0).any():
        raise InputError(f"seeds: expected a list of integers >= 0, one per scene, got {seeds!r:.80}")
    return array.astype(np.int64)
