"""Tabletop tasks with things that stay where they are, as frozen settings: how a scene is drawn, how it moves, how it
looks.

``Detour`` has two equally good ways and tests multimodality (with ``wind``: and the price of indecision), ``Push``
needs feedback, ``Compose`` asks for combinations of words that were never shown.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np
from jaxtyping import Bool, Float, Float32

from vola.envs.painting import Box, Cross, Disc, Ring, Sprite
from vola.envs.scene import (
    BLOCK_COLOUR,
    COLOURS,
    SUBSTEPS,
    WALL_COLOUR,
    Reach,
    Scene,
    World,
    check_common,
    distance,
    everyone,
    object_sprites,
    robot_sprites,
    same,
)
from vola.errors import ConfigError
from vola.types import StateSpec


@final
@dataclass(frozen=True)
class Detour(Reach):
    """Go to the disc of a colour; a wall stands in the way and both ways round are equally good.

    Failure: touching the wall, or time. The defaults are the geometry in which regression to the mean of both ways
    fails and generative heads do not (chunks of 4 steps and more).

    speed: m per step. start_x, start_y: how far the start lies beside the middle of the wall, and (low, high) below
    its lower edge. wall_jitter: the wall's centre is uniform within +- this of the table's centre.
    distractors: discs of other colours (0..3).
    wind: m per step that a robot below the wall is carried up, whatever it does; calm from the wall's upper edge on.
        With wind near ``speed`` nobody can wait below the wall, so changing one's mind costs the only thing there is
        little of. ``vola/Gust-v0`` has it, together with kicks.
    """

    name: ClassVar[str] = "detour"
    state_spec: ClassVar[StateSpec] = StateSpec(("x", "y"), ("m", "m"))
    state_limit: ClassVar[tuple[float, ...]] = (1.0, 1.0)
    time_limit: int = 40
    speed: float = 0.12
    distractors: int = 3
    robot_radius: float = 0.05
    goal_radius: float = 0.10
    wall_half_width: float = 0.30
    wall_half_height: float = 0.10
    wall_jitter: tuple[float, float] = (0.15, 0.10)
    start_x: float = 0.10
    start_y: tuple[float, float] = (0.40, 0.50)
    wind: float = 0.0

    def __post_init__(self) -> None:
        check_common(self, goal_radius=self.goal_radius)
        if not 0 <= self.wind <= 0.3:
            raise ConfigError(f"wind: expected 0 .. 0.3 m per step, got {self.wind!r}")
        if self.wall_half_width + self.wall_jitter[0] > 0.75:
            raise ConfigError(
                "wall_half_width + wall_jitter[0]: expected at most 0.75, so that the robot can pass between wall and "
                f"table edge, got {self.wall_half_width + self.wall_jitter[0]:g}"
            )
        if self.wall_half_height + self.wall_jitter[1] > 0.30:
            raise ConfigError(
                "wall_half_height + wall_jitter[1]: expected at most 0.30, so that the wall stays clear of the discs, "
                f"got {self.wall_half_height + self.wall_jitter[1]:g}"
            )

    def draw(self, rng: np.random.Generator) -> Scene:
        wall = rng.uniform(-1, 1, 2) * self.wall_jitter
        aside, below = rng.uniform(-self.start_x, self.start_x), rng.uniform(*self.start_y)
        robot = np.array([wall[0] + aside, max(wall[1] - self.wall_half_height - below, -1.0)])
        M = self.distractors + 1
        slots = np.array([-0.75, -0.25, 0.25, 0.75])[rng.permutation(4)]
        objects = np.stack([slots, rng.uniform(0.55, 0.85, 4)], axis=1)[:M]
        colours = rng.permutation(4)[:M]
        text = f"go to the {COLOURS[colours[0]]} disc"
        return Scene(robot, objects[0], objects, colours, np.zeros(M, np.int64), wall, np.zeros(2), text)

    def carried(self, world: World) -> Float[np.ndarray, "n 2"]:
        """What the wind adds to the displacement (m) of one step, decided by where the robot is at its beginning."""
        below = world.robot[:, 1] < world.wall[:, 1] + self.wall_half_height
        return np.stack([np.zeros(len(below)), np.where(below, self.wind, 0.0)], axis=1)

    def advance(self, world: World, rows: np.ndarray, displacement: np.ndarray) -> Bool[np.ndarray, " m"]:
        hit = np.zeros(len(rows), bool)
        if self.wind > 0:
            displacement = displacement + self.carried(world.take(rows))
        place, wall = world.robot[rows], world.wall[rows]
        for _ in range(SUBSTEPS):
            there = np.clip(place + displacement / SUBSTEPS, -1, 1)
            over = np.maximum(np.abs(there - wall) - (self.wall_half_width, self.wall_half_height), 0)
            hit |= np.sqrt(over[:, 0] ** 2 + over[:, 1] ** 2) < self.robot_radius
            place = np.where(hit[:, None], place, there)  # it stops just before the wall
        world.robot[rows] = place
        return hit

    def sprites(self, world: World) -> list[Sprite]:
        wall = Box((self.wall_half_width, self.wall_half_height), corner=0.02)
        return [
            *object_sprites(world, (Disc(self.goal_radius),)),
            Sprite(wall, everyone(world), world.wall, same(WALL_COLOUR, world)),
            *robot_sprites(world, self.robot_radius),
        ]


@final
@dataclass(frozen=True)
class Push(Reach):
    """Push the block into the ring of a colour: contact is unstable without feedback.

    Disc against disc, quasi-static: where they overlap, the block moves out along the line of centres. The state
    holds robot xy, block xy (m) and 3 x (block - robot), the small difference that pushing depends on, enlarged.

    speed: m per step. ring_distance: of the rings from the table's centre. distractors: other rings (0..3).
    """

    name: ClassVar[str] = "push"
    state_spec: ClassVar[StateSpec] = StateSpec(
        ("robot_x", "robot_y", "block_x", "block_y", "offset_x", "offset_y"), ("m", "m", "m", "m", "m/3", "m/3")
    )
    state_limit: ClassVar[tuple[float, ...]] = (1.0, 1.0, 1.0, 1.0, 6.0, 6.0)
    time_limit: int = 110
    speed: float = 0.06
    distractors: int = 2
    robot_radius: float = 0.06
    goal_radius: float = 0.10
    block_radius: float = 0.13
    ring_distance: float = 0.70

    def __post_init__(self) -> None:
        check_common(self, goal_radius=self.goal_radius)
        if not 0.3 <= self.ring_distance <= self.rail:
            raise ConfigError(
                f"ring_distance: expected 0.3 .. {self.rail:g} (the block cannot go further), got {self.ring_distance}"
            )

    @property
    def rail(self) -> float:
        """How far from the middle the block's centre can go in x and y (m): the robot still fits behind it."""
        return 1.0 - self.block_radius - self.robot_radius

    def draw(self, rng: np.random.Generator) -> Scene:
        M = self.distractors + 1
        turn, jitter = rng.uniform(0, 2 * math.pi), rng.uniform(-0.3, 0.3, 4)
        angles = [turn + 2 * math.pi * i / M + jitter[i] for i in range(M)]
        objects = self.ring_distance * np.array([(math.cos(a), math.sin(a)) for a in angles])
        block = rng.uniform(-0.15, 0.15, 2)
        aim, away = rng.uniform(0, 2 * math.pi), rng.uniform(0.35, 0.65)
        robot = block + away * np.array([math.cos(aim), math.sin(aim)])
        colours = rng.permutation(4)[:M]
        text = f"push the block to the {COLOURS[colours[0]]} ring"
        return Scene(robot, objects[0], objects, colours, np.zeros(M, np.int64), np.zeros(2), block, text)

    def state(self, world: World) -> Float32[np.ndarray, "n S"]:
        parts = [world.robot, world.block, 3 * (world.block - world.robot)]
        return np.concatenate(parts, axis=1).astype(np.float32)

    def mover(self, world: World) -> Float[np.ndarray, "n 2"]:
        return world.block

    def advance(self, world: World, rows: np.ndarray, displacement: np.ndarray) -> Bool[np.ndarray, " m"]:
        robot, block = world.robot[rows], world.block[rows]
        contact = self.robot_radius + self.block_radius
        for _ in range(SUBSTEPS):
            robot = np.clip(robot + displacement / SUBSTEPS, -1, 1)
            apart = distance(block, robot)
            normal = np.where(apart[:, None] > 1e-9, (block - robot) / np.maximum(apart, 1e-9)[:, None], (1.0, 0.0))
            touching = (apart < contact)[:, None]
            block = np.where(touching, np.clip(robot + normal * contact, -self.rail, self.rail), block)
            # A block held by the rail holds the robot.
            held = touching & (distance(block, robot) < contact - 1e-9)[:, None]
            robot = np.where(held, np.clip(block - normal * contact, -1, 1), robot)
        world.robot[rows], world.block[rows] = robot, block
        return np.zeros(len(rows), bool)

    def sprites(self, world: World) -> list[Sprite]:
        block = Sprite(Disc(self.block_radius), everyone(world), world.block, same(BLOCK_COLOUR, world))
        ring = Ring(self.block_radius + 0.05, 0.04)
        return [*object_sprites(world, (ring,), shadow=False), block, *robot_sprites(world, self.robot_radius)]


Split = Literal["all", "seen", "held_out"]
SHAPES = ("disc", "ring", "cross")
PLACES = {"left of": (-1.0, 0.0), "right of": (1.0, 0.0), "above": (0.0, 1.0), "below": (0.0, -1.0)}


def combinations(split: Split) -> list[tuple[int, int, int]]:
    """(colour, shape, place) indices of a split: of the 4 x 3 x 4 = 48, held out are the 12 whose sum divides by 4.

    Every word of the language occurs among the 36 seen combinations, so the held-out ones need no new word.
    """
    every = itertools.product(range(len(COLOURS)), range(len(SHAPES)), range(len(PLACES)))
    return [c for c in every if split == "all" or (sum(c) % 4 == 0) == (split == "held_out")]


@final
@dataclass(frozen=True)
class Compose(Reach):
    """Go to a place beside one of four objects: "go left of the red ring"; colour x shape x place.

    Success is judged when the time is over: the robot must stay there. The other objects are, in this order, one of
    the same colour, one of the same shape, one different in both, so neither word alone is enough.

    speed: m per step. place_distance: from the object's centre to the place. distractors: other objects (0..3).
    split: which combinations of words occur, "all" | "seen" | "held_out". told: "words", or "number": "task 17"
    instead of the sentence, one of 48 numbers that have nothing in common.
    """

    name: ClassVar[str] = "compose"
    state_spec: ClassVar[StateSpec] = StateSpec(("x", "y"), ("m", "m"))
    state_limit: ClassVar[tuple[float, ...]] = (1.0, 1.0)
    judged_at_end: ClassVar[bool] = True
    time_limit: int = 24
    speed: float = 0.12
    distractors: int = 3
    robot_radius: float = 0.05
    goal_radius: float = 0.10
    object_radius: float = 0.13
    place_distance: float = 0.24
    split: Split = "all"
    told: Literal["words", "number"] = "words"

    def __post_init__(self) -> None:
        check_common(self, goal_radius=self.goal_radius)
        if self.split not in ("all", "seen", "held_out"):
            raise ConfigError(f'split: expected "all", "seen" or "held_out", got {self.split!r}')
        if self.told not in ("words", "number"):
            raise ConfigError(f'told: expected "words" or "number", got {self.told!r}')

    def draw(self, rng: np.random.Generator) -> Scene:
        choices = combinations(self.split)
        c, s, p = choices[int(rng.integers(len(choices)))]
        c2, c3 = (c + rng.permutation(np.arange(1, 4))[:2]) % 4
        s1, s3 = (s + rng.integers(1, 3, 2)) % 3
        M = self.distractors + 1
        colours, shapes = np.array([c, c, c2, c3])[:M], np.array([s, s1, s, s3])[:M]
        cells = rng.permutation(9)[:4]
        grid = np.stack([cells % 3 - 1, cells // 3 - 1], axis=1) * 0.62
        objects = (grid + rng.uniform(-0.04, 0.04, (4, 2)))[:M]
        word, step = list(PLACES.items())[p]
        goal = objects[0] + np.array(step) * self.place_distance
        text = f"go {word} the {COLOURS[c]} {SHAPES[s]}"
        if self.told == "number":
            text = f"task {combinations('all').index((c, s, p))}"
        return Scene(rng.uniform(-0.8, 0.8, 2), goal, objects, colours, shapes, np.zeros(2), np.zeros(2), text)

    def advance(self, world: World, rows: np.ndarray, displacement: np.ndarray) -> Bool[np.ndarray, " m"]:
        world.robot[rows] = np.clip(world.robot[rows] + displacement, -1, 1)
        return np.zeros(len(rows), bool)

    def mistake(self, world: World) -> list[str]:
        steps = np.array(list(PLACES.values())) * self.place_distance
        candidates = world.objects[:, :, None] + steps  # n M 4 2
        away = distance(world.robot[:, None, None], candidates)
        nearest = away.reshape(len(away), -1).argmin(axis=1)
        kinds = np.where(nearest // len(PLACES) == 0, "wrong_place", "wrong_object")
        return np.where(away.min(axis=(1, 2)) < self.goal_radius, kinds, "timeout").tolist()

    def sprites(self, world: World) -> list[Sprite]:
        r = self.object_radius
        shapes = (Disc(r), Ring(r, 0.4 * r), Cross(r, 0.6 * r))
        return [*object_sprites(world, shapes), *robot_sprites(world, self.robot_radius)]
