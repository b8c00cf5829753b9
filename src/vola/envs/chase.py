"""``Chase``: touch a disc that moves. Its velocity is in no single picture, so a policy needs a window of frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from jaxtyping import Bool, Float

from vola.envs.painting import Disc, Sprite
from vola.envs.scene import (
    COLOURS,
    Reach,
    Scene,
    World,
    check_common,
    object_sprites,
    robot_sprites,
)
from vola.errors import ConfigError
from vola.types import StateSpec

LANES = np.array([-0.24, 0.16, 0.56])  # m, y of the lanes' middles; they are 0.4 m apart
LANE_HALF_HEIGHT = 0.08  # m, within which a disc's centre stays
LANE_HALF_WIDTH = 0.88  # m
SLOPE = 0.25  # largest ratio of vertical to horizontal velocity
FORESIGHT = 64  # steps


@final
@dataclass(frozen=True)
class Chase(Reach):
    """Touch the disc of a colour while all discs run to and fro, each in a lane of its own.

    A disc moves with constant velocity and bounces off the borders of its lane; all discs have the same speed, so
    motion alone names no target. Success: the centres are closer than ``goal_radius`` at the end of a step.
    Failure: "timeout", "wrong_object" (close to another disc when the time was over).

    target_speed: of the discs, m per step, the knob of difficulty. At 0 this is reaching. Going to where the disc *is*,
        all that one picture tells, succeeds in 100 / 93 / 81 / 73 % of 2000 scenes at 0.06 / 0.09 / 0.10 / 0.15 m;
        the expert, which intercepts, in 100 % (``tests/envs/test_new_tasks.py``).
    speed: of the robot, m per step. distractors: discs of other colours (0..2).
    """

    name: ClassVar[str] = "chase"
    state_spec: ClassVar[StateSpec] = StateSpec(("x", "y"), ("m", "m"))
    state_limit: ClassVar[tuple[float, ...]] = (1.0, 1.0)
    time_limit: int = 22
    speed: float = 0.10
    distractors: int = 2
    robot_radius: float = 0.05
    goal_radius: float = 0.12
    object_radius: float = 0.09
    target_speed: float = 0.10

    def __post_init__(self) -> None:
        check_common(self, most_distractors=2, goal_radius=self.goal_radius, object_radius=self.object_radius)
        if not 0 <= self.target_speed <= 0.15:
            raise ConfigError(f"target_speed: expected 0 .. 0.15 m per step, got {self.target_speed!r}")

    def draw(self, rng: np.random.Generator) -> Scene:
        robot = np.array([rng.uniform(-0.8, 0.8), rng.uniform(-0.9, -0.7)])
        lane, M = rng.permutation(3), self.distractors + 1
        place = rng.uniform(-1, 1, (3, 2)) * (LANE_HALF_WIDTH, LANE_HALF_HEIGHT)
        objects = (place + np.stack([np.zeros(3), LANES[lane]], axis=1))[:M]
        turn, sign = np.arctan(rng.uniform(-SLOPE, SLOPE, 3)), rng.choice([-1.0, 1.0], 3)
        velocity = (self.target_speed * np.stack([sign * np.cos(turn), np.sin(turn)], axis=1))[:M]
        colours = rng.permutation(4)[:M]
        text = f"catch the {COLOURS[colours[0]]} disc"
        kinds, nothing = np.zeros(M, np.int64), np.zeros(2)
        return Scene(robot, objects[0], objects, colours, kinds, nothing, nothing, text, velocity)

    def advance(self, world: World, rows: np.ndarray, displacement: np.ndarray) -> Bool[np.ndarray, " m"]:
        world.robot[rows] = np.clip(world.robot[rows] + displacement, -1, 1)
        world.objects[rows], world.velocity[rows] = move_discs(world.objects[rows], world.velocity[rows])
        world.goal[rows] = world.objects[rows, 0]
        return np.zeros(len(rows), bool)

    def sprites(self, world: World) -> list[Sprite]:
        return [*object_sprites(world, (Disc(self.object_radius),)), *robot_sprites(world, self.robot_radius)]


def move_discs(
    place: Float[np.ndarray, "*d 2"], velocity: Float[np.ndarray, "*d 2"]
) -> tuple[Float[np.ndarray, "*d 2"], Float[np.ndarray, "*d 2"]]:
    """Places (m) and velocities (m per step) one step later: reflected at the borders of the lane they are in."""
    nearest = np.abs(place[..., 1, None] - LANES).argmin(axis=-1)
    middle = np.stack([np.zeros(place.shape[:-1]), LANES[nearest]], axis=-1)
    half = np.array([LANE_HALF_WIDTH, LANE_HALF_HEIGHT])
    free = place + velocity - middle
    out = np.abs(free) > half
    folded = np.where(out, np.sign(free) * 2 * half - free, free)
    return middle + folded, np.where(out, -velocity, velocity)


def future(world: World, steps: int = FORESIGHT) -> Float[np.ndarray, "n h 2"]:
    """Where the named disc will be after 1 .. ``steps`` steps (m)."""
    place, velocity, out = world.objects[:, 0], world.velocity[:, 0], []
    for _ in range(steps):
        place, velocity = move_discs(place, velocity)
        out.append(place)
    return np.stack(out, axis=1)
