"""What every tabletop task is made of: the scene of one episode, the world of n scenes, and what a task must say.

All lengths are metres on a table [-1, 1]^2 seen from above (x right, y up); a control step is 1/10 s. The robot is a
disc. Tasks are frozen settings (``vola.envs.tasks``, ``insert``, ``chase``); everything that changes is in ``World``.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from vola.envs.painting import Disc, Shape, Sprite
from vola.errors import ConfigError
from vola.types import StateSpec

COLOURS = ("red", "green", "blue", "yellow")
PALETTE = np.array([(222, 88, 84), (86, 176, 104), (76, 128, 214), (240, 190, 66)], np.float64)
ROBOT_COLOUR = (62.0, 66.0, 78.0)
ROBOT_CAP_COLOUR = (176.0, 182.0, 196.0)
WALL_COLOUR = (150.0, 144.0, 138.0)
BLOCK_COLOUR = (190.0, 156.0, 122.0)
SUBSTEPS = 4  # contact is tested this often along one step, so that no corner is cut

FAILURES = ("collision", "timeout", "wrong_object", "wrong_place", "wrong_slot", "miss")


@dataclass(frozen=True)
class Scene:
    """Where everything is at the start of one episode; ``objects[0]`` is the one the instruction names.

    wall, block and velocity (of the objects, m per step) are zero in tasks that have none. goal is the point that
    decides success. crossing is filled in while the episode runs: see ``Insert``.
    """

    robot: Float[np.ndarray, " 2"]
    goal: Float[np.ndarray, " 2"]
    objects: Float[np.ndarray, "M 2"]
    colours: Int[np.ndarray, " M"]
    shapes: Int[np.ndarray, " M"]
    wall: Float[np.ndarray, " 2"]
    block: Float[np.ndarray, " 2"]
    instruction: str
    velocity: Float[np.ndarray, "V 2"] = field(default_factory=lambda: np.zeros((1, 2)))
    crossing: float = np.nan

    @functools.cached_property
    def hash(self) -> str:
        """12 hexadecimal digits of everything in this scene, the sentence included.

        A velocity counts where there is one, so that tasks without keep the hashes they had before it existed.
        """
        digest = hashlib.sha256(self.instruction.encode())
        for name in ("robot", "goal", "objects", "colours", "shapes", "wall", "block"):
            digest.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        if self.velocity.any():
            digest.update(np.ascontiguousarray(self.velocity).tobytes())
        return digest.hexdigest()[:12]


@dataclass
class World:
    """n scenes side by side (the mutable state of a Tabletop): the fields of ``Scene`` with a leading axis n."""

    robot: Float[np.ndarray, "n 2"]
    goal: Float[np.ndarray, "n 2"]
    objects: Float[np.ndarray, "n M 2"]
    colours: Int[np.ndarray, "n M"]
    shapes: Int[np.ndarray, "n M"]
    wall: Float[np.ndarray, "n 2"]
    block: Float[np.ndarray, "n 2"]
    velocity: Float[np.ndarray, "n V 2"]
    crossing: Float[np.ndarray, " n"]

    @staticmethod
    def of(scenes: list[Scene]) -> World:
        """The world of these scenes."""
        return World(*(np.stack([getattr(s, f.name) for s in scenes]) for f in fields(World)))

    def put(self, rows: np.ndarray, other: World) -> None:
        """Replace some scenes by those of ``other``."""
        for f in fields(World):
            getattr(self, f.name)[rows] = getattr(other, f.name)

    def take(self, rows: np.ndarray) -> World:
        """A copy of some scenes."""
        return World(*(getattr(self, f.name)[rows] for f in fields(World)))


class Task(ABC):
    """What a task must say. Implementations are frozen dataclasses and hold settings only."""

    name: ClassVar[str]
    state_spec: ClassVar[StateSpec]
    state_limit: ClassVar[tuple[float, ...]]  # largest magnitude of each state dimension
    judged_at_end: ClassVar[bool] = False  # success counts only when the time is over (the robot must stay)
    time_limit: int
    speed: float
    distractors: int
    robot_radius: float

    @property
    def action_kind(self) -> Literal["delta", "position"]:
        """What the two numbers of an action are: a displacement (m) or the place to go to (m)."""
        return "delta"

    @abstractmethod
    def draw(self, rng: np.random.Generator) -> Scene:
        """A random scene."""

    @abstractmethod
    def advance(self, world: World, rows: np.ndarray, displacement: np.ndarray) -> Bool[np.ndarray, " m"]:
        """Move the robots of ``rows`` by displacement ``m 2`` (m) and say for which of them this is a failure."""

    @abstractmethod
    def sprites(self, world: World) -> list[Sprite]:
        """What to paint, back to front."""

    @abstractmethod
    def reached(self, world: World) -> Bool[np.ndarray, " n"]:
        """Is the task fulfilled now?"""

    @abstractmethod
    def measure(self, world: World) -> Float[np.ndarray, " n"]:
        """How far off (m) each scene is now; NaN where that is not known yet. Success is a threshold on it."""

    @abstractmethod
    def mistake(self, world: World) -> list[str]:
        """For scenes that ran out of time: what went wrong."""

    def crash(self, world: World) -> list[str]:
        """For scenes that ``advance`` ended: what went wrong."""
        return ["collision"] * len(world.robot)

    def state(self, world: World) -> Float32[np.ndarray, "n S"]:
        """The robot's own sensors, in the units of ``state_spec``."""
        return world.robot.astype(np.float32)


class Reach(Task):
    """Tasks in which something (robot or block) must come closer than ``goal_radius`` (m) to the goal."""

    goal_radius: float

    def reached(self, world: World) -> Bool[np.ndarray, " n"]:
        """Is the robot (or the block) at the goal now?"""
        return self.measure(world) < self.goal_radius

    def measure(self, world: World) -> Float[np.ndarray, " n"]:
        """Distance (m) of the robot (or the block) from the goal."""
        return distance(self.mover(world), world.goal)

    def mistake(self, world: World) -> list[str]:
        """Standing at another object, or nowhere."""
        wrong = distance(self.mover(world)[:, None], world.objects[:, 1:]) < self.goal_radius
        return np.where(wrong.any(axis=1), "wrong_object", "timeout").tolist()

    def mover(self, world: World) -> Float[np.ndarray, "n 2"]:
        """The centre of the thing that must arrive at the goal."""
        return world.robot


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Euclidean distance along the last axis of two arrays ``... 2``; written out so that it never depends on n."""
    d = a - b
    return np.sqrt(d[..., 0] * d[..., 0] + d[..., 1] * d[..., 1])


def check_common(task: Task, most_distractors: int = 3, **lengths: float) -> None:
    """Refuse settings that no task can use; ``lengths`` are further ones (m) with the bounds of a radius.

    Raises:
        ConfigError: naming the setting.
    """
    if not isinstance(task.time_limit, int) or task.time_limit < 1:
        raise ConfigError(f"time_limit: expected a whole number of steps above 0, got {task.time_limit!r}")
    for name, length in {"speed": task.speed, "robot_radius": task.robot_radius, **lengths}.items():
        if not 0 < length <= 0.3:
            raise ConfigError(f"{name}: expected above 0 and at most 0.3 m, got {length!r}")
    if task.distractors not in range(most_distractors + 1):
        raise ConfigError(f"distractors: expected 0 .. {most_distractors} other objects, got {task.distractors!r}")


def everyone(world: World) -> np.ndarray:
    """The indices 0 .. n-1."""
    return np.arange(len(world.robot))


def same(colour: tuple[float, float, float], world: World) -> np.ndarray:
    """One colour for all n scenes, ``n 3``."""
    return np.broadcast_to(np.array(colour), (len(world.robot), 3))


def object_sprites(world: World, shapes: tuple[Shape, ...], shadow: bool = True) -> list[Sprite]:
    """The coloured objects; ``world.shapes`` indexes ``shapes``."""
    out = []
    for m, (i, shape) in itertools.product(range(world.objects.shape[1]), enumerate(shapes)):
        rows = np.flatnonzero(world.shapes[:, m] == i)
        out.append(Sprite(shape, rows, world.objects[rows, m], PALETTE[world.colours[rows, m]], shadow))
    return out


def robot_sprites(world: World, radius: float) -> list[Sprite]:
    """The robot: a dark disc with a light cap."""
    body = Sprite(Disc(radius), everyone(world), world.robot, same(ROBOT_COLOUR, world))
    cap = Sprite(Disc(0.45 * radius), everyone(world), world.robot, same(ROBOT_CAP_COLOUR, world), shadow=False)
    return [body, cap]
