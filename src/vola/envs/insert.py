"""``Insert``: cross the mouth of the slot of a colour. Precision in one dimension, so that the error of an action
representation (bins, compression) can be read off directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np
from jaxtyping import Bool, Float

from vola.envs.painting import Box, Sprite
from vola.envs.scene import (
    COLOURS,
    PALETTE,
    WALL_COLOUR,
    Scene,
    Task,
    World,
    check_common,
    everyone,
    robot_sprites,
    same,
)
from vola.errors import ConfigError
from vola.types import StateSpec

PLATE_HALF_HEIGHT = 0.05  # m
NOTCH_COLOUR = (250.0, 250.0, 250.0)
SLOT = Box((0.10, 0.08), corner=0.02)
NOTCH = Box((0.03, 0.08))
# A plate painted in pieces keeps the bounding boxes, and with them the frame around every picture, small.
PIECE, PIECES = Box((0.26, PLATE_HALF_HEIGHT)), (-0.75, -0.25, 0.25, 0.75)


@final
@dataclass(frozen=True)
class Insert(Task):
    """Cross the plate through the slot of a colour; the first crossing decides.

    The plate is a line across the table at y = goal_y. Where the robot's straight way of one step crosses it, the
    signed error x - slot_x (m) is recorded (``measure``; NaN before), so one evaluation gives the success at every
    tolerance: ``abs(measure) < tolerance``. Failure: "wrong_slot" (the other slot was nearer), "miss", "timeout".

    Actions are places on the table, [-1, 1] per axis, so K uniform bins have steps of R/K = 2/K m and an error that
    is uniform within +- R/(2K); ``actions="delta"`` takes displacements instead, whose errors feedback corrects.

    The expert succeeds in 2000 of 2000 scenes, also under execution noise of 0.1 ``speed`` (``test_new_tasks.py``).

    tolerance: largest error (m) that succeeds, the knob of difficulty. speed: m per step. plate_y: (low, high) of
    the plate. slot_x: (low, high) of the slots' distance from the middle, one on each side. distractors: 1 shows
    both slots, 0 the named one only.
    """

    name: ClassVar[str] = "insert"
    state_spec: ClassVar[StateSpec] = StateSpec(("x", "y"), ("m", "m"))
    state_limit: ClassVar[tuple[float, ...]] = (1.0, 1.0)
    time_limit: int = 28
    speed: float = 0.12
    distractors: int = 1
    robot_radius: float = 0.05
    tolerance: float = 0.03
    actions: Literal["position", "delta"] = "position"
    plate_y: tuple[float, float] = (0.35, 0.55)
    slot_x: tuple[float, float] = (0.20, 0.85)

    def __post_init__(self) -> None:
        check_common(self, most_distractors=1, tolerance=self.tolerance)
        if self.actions not in ("position", "delta"):
            raise ConfigError(f'actions: expected "position" or "delta", got {self.actions!r}')
        if not 0.0 <= self.plate_y[0] <= self.plate_y[1] <= 0.85:
            raise ConfigError(f"plate_y: expected 0 <= low <= high <= 0.85, got {self.plate_y}")
        if not 0.1 <= self.slot_x[0] <= self.slot_x[1] <= 0.9:
            raise ConfigError(f"slot_x: expected 0.1 <= low <= high <= 0.9, got {self.slot_x}")

    @property
    def action_kind(self) -> Literal["delta", "position"]:
        return self.actions

    def draw(self, rng: np.random.Generator) -> Scene:
        robot = np.array([rng.uniform(-0.8, 0.8), rng.uniform(-0.85, -0.35)])
        y, sign = rng.uniform(*self.plate_y), rng.permutation([-1.0, 1.0])
        slots = np.stack([sign * rng.uniform(*self.slot_x, 2), np.full(2, y)], axis=1)
        M = self.distractors + 1
        objects, colours = slots[:M], rng.permutation(4)[:M]
        text = f"insert into the {COLOURS[colours[0]]} slot"
        return Scene(robot, objects[0], objects, colours, np.zeros(M, np.int64), np.zeros(2), np.zeros(2), text)

    def advance(self, world: World, rows: np.ndarray, displacement: np.ndarray) -> Bool[np.ndarray, " m"]:
        before, goal = world.robot[rows], world.goal[rows]
        after = np.clip(before + displacement, -1, 1)
        crossed = after[:, 1] >= goal[:, 1]  # it starts below and the first crossing ends the episode
        rise = np.maximum(after[:, 1] - before[:, 1], 1e-12)
        x = before[:, 0] + (after[:, 0] - before[:, 0]) * (goal[:, 1] - before[:, 1]) / rise
        error = np.where(crossed, x - goal[:, 0], np.nan)
        world.robot[rows], world.crossing[rows] = after, error
        return crossed & ~(np.abs(error) < self.tolerance)

    def reached(self, world: World) -> Bool[np.ndarray, " n"]:
        return np.abs(world.crossing) < self.tolerance

    def measure(self, world: World) -> Float[np.ndarray, " n"]:
        """Signed error x - slot_x (m) where the robot crossed the plate; NaN before."""
        return world.crossing.copy()

    def mistake(self, world: World) -> list[str]:
        return ["timeout"] * len(world.robot)

    def crash(self, world: World) -> list[str]:
        x = world.goal[:, 0] + world.crossing
        nearest = np.abs(x[:, None] - world.objects[:, :, 0]).argmin(axis=1)
        return np.where(nearest > 0, "wrong_slot", "miss").tolist()

    def sprites(self, world: World) -> list[Sprite]:
        rows, grey, notch = everyone(world), same(WALL_COLOUR, world), same(NOTCH_COLOUR, world)
        y = world.goal[:, 1]
        out = [Sprite(PIECE, rows, np.stack([np.full(len(y), x), y], axis=1), grey, shadow=False) for x in PIECES]
        for m in range(world.objects.shape[1]):
            place = world.objects[:, m]
            out.append(Sprite(SLOT, rows, place, PALETTE[world.colours[:, m]], shadow=False))
            out.append(Sprite(NOTCH, rows, place, notch, shadow=False))
        return [*out, *robot_sprites(world, self.robot_radius)]
