"""Experts: planners that read the privileged state of the Tabletop they are bound to and succeed always.

They make demonstrations and give the ceiling of every comparison. For ``Detour`` each start state should be shown
once per side (``scene_requests``): with one random side per scene a regression head memorises scene -> side and the
failure of averaging does not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from vola.envs.chase import Chase, future
from vola.envs.insert import Insert
from vola.envs.scene import World, distance
from vola.envs.tabletop import Tabletop, TabletopConfig
from vola.envs.tasks import Detour, Push
from vola.errors import ConfigError, InputError
from vola.types import Chunk, Guide, Observation

LEFT, NEAR, RIGHT = -1, 0, 1
Sides = Literal["both", "left", "right", "near"]

CLEARANCE = 0.20  # m, waypoints of the detour beside the ends of the wall
MARGIN = 0.10  # m, and below and above it
WINDY_CLEARANCE = 0.25  # m, where kicks are to be expected
SIDE_SLACK = 0.10  # m, how far beyond the middle a robot counts as gone to the other side
HOVER = 0.07  # m below the mouth of a slot, where the last correction is made
LATERAL_GAIN = 1.2  # of pushing: sideways correction per metre off the line to the goal


class Expert:
    """The expert of a Tabletop's task: a ``Planner`` with chunks of one step.

    sides: for Detour, per scene -1 (left of the wall), +1 (right) or 0 (the side the start lies on, the default);
    the other tasks ignore it. A plan covers all n scenes of the table, also finished ones.
    """

    def __init__(self, table: Tabletop, sides: Int[np.ndarray, " n"] | Sequence[int] | None = None) -> None:
        if sides is not None and not np.isin(sides, (LEFT, NEAR, RIGHT)).all():
            raise InputError(f"sides: expected -1 (left), 0 (nearer) or +1 (right) per scene, got {sides!r:.80}")
        self._table = table
        self._sides = None if sides is None else np.asarray(sides, np.int64)

    @property
    def observation_window(self) -> int:
        """T = 1: it reads the table, not a history."""
        return 1

    @property
    def chunk_length(self) -> int:
        """H = 1: the expert looks again in every step."""
        return 1

    def plan(
        self, observation: Observation, rngs: Sequence[np.random.Generator] = (), guide: Guide | None = None
    ) -> Chunk:
        """The next action (m, as ``table.spec.action`` says) of every scene; only the size of ``observation`` is used,
        ``rngs`` not at all.

        Raises:
            InputError: the observation is not of all n scenes of the bound table.
            ConfigError: a guide; the expert makes one action and continues nothing.
        """
        if guide is not None:
            raise ConfigError("Expert: expected no guide, it plans one action at a time. Execute it with Receding(1).")
        if observation.size != self._table.n:
            raise InputError(
                f"Expert: expected an observation of all {self._table.n} scenes of its table, got {observation.size}. "
                "An expert reads the table itself; ask it for all scenes and drop the rows you do not need."
            )
        actions = self.act()[:, None].astype(np.float32)
        return Chunk(actions, np.ones(actions.shape[:2], bool))

    def act(self) -> Float[np.ndarray, "n 2"]:
        """The next action (m) of every scene: a displacement, or the place one step away where actions are places."""
        task, world = self._table.config.task, self._table.world
        if isinstance(task, Detour):
            move = detour_move(task, world, self._resolved(world))
        elif isinstance(task, Push):
            move = _shorten(_push(task, world), task.speed)
        elif isinstance(task, Insert):
            move = _shorten(_insert(task, world), task.speed)
        elif isinstance(task, Chase):
            move = _shorten(_chase(task, world), task.speed)
        else:
            move = _shorten(world.goal - world.robot, task.speed)
        return np.clip(world.robot + move, -1, 1) if task.action_kind == "position" else move

    def _resolved(self, world: World) -> np.ndarray:
        """A side per scene, "nearer" decided by where the episode started."""
        n = len(world.robot)
        sides = np.zeros(n, np.int64) if self._sides is None else self._sides
        if len(sides) != n:
            raise InputError(f"sides: expected one per scene, n={n}, got {len(sides)}")
        return np.where(sides == NEAR, nearer_sides(self._table.start), sides)


def nearer_sides(world: World, before: Int[np.ndarray, " n"] | None = None) -> Int[np.ndarray, " n"]:
    """The side of the wall (-1, +1) that each robot is on.

    before: the sides chosen a step ago; one is changed only where the robot is more than ``SIDE_SLACK`` beyond the
    middle, so that one episode keeps one side unless its robot really goes round the other way.
    """
    aside = world.robot[:, 0] - world.wall[:, 0]
    near = np.where(aside < 0, LEFT, RIGHT)
    return near if before is None else np.where(np.abs(aside) > SIDE_SLACK, near, before)


def detour_move(task: Detour, world: World, sides: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n 2"]:
    """The displacement (m) of one step round the wall on the given sides (-1, +1), at most ``task.speed`` long."""
    if task.wind > 0:
        return _windy(task, world, sides)
    return _shorten(_detour(task, world, sides), task.speed)


def _detour(task: Detour, world: World, sides: np.ndarray) -> np.ndarray:
    """Below the end of the wall, up beside it, then straight to the disc."""
    beside = world.wall[:, 0] + sides * (task.wall_half_width + CLEARANCE)
    half = task.wall_half_height + MARGIN
    low, high = np.stack([beside, world.wall[:, 1] - half], 1), np.stack([beside, world.wall[:, 1] + half], 1)
    # Half a step of slack, so that execution noise does not send it back to a waypoint it has passed.
    clear = sides * (world.robot[:, 0] - beside) > -min(task.speed / 2, CLEARANCE / 3)
    above = world.robot[:, 1] > high[:, 1] - 1e-6
    target = np.where(above[:, None], world.goal, np.where(clear[:, None], high, low))
    return target - world.robot


def _windy(task: Detour, world: World, sides: np.ndarray) -> np.ndarray:
    """Sideways first, and only with what is left of the speed up or against the wind."""
    sideways = world.wall[:, 0] + sides * (task.wall_half_width + WINDY_CLEARANCE) - world.robot[:, 0]
    dx = np.clip(sideways, -task.speed, task.speed)
    rest = np.sqrt(np.maximum(task.speed**2 - dx**2, 0.0))
    clear = sides * sideways < WINDY_CLEARANCE / 5
    below = np.stack([dx, np.where(clear, rest, -rest)], axis=1)
    past = world.robot[:, 1] > world.wall[:, 1] + task.wall_half_height + WINDY_CLEARANCE
    straight = _shorten(world.goal - world.robot - task.carried(world), task.speed)
    return np.where(past[:, None], straight, below)


def _insert(task: Insert, world: World) -> np.ndarray:
    """To the point below the mouth, and through it only when the error left is small against the tolerance."""
    offset = world.goal - world.robot
    aligned = (np.abs(offset[:, 0]) < min(task.tolerance / 3, 0.01)) & (offset[:, 1] < HOVER + task.speed / 2)
    through = np.stack([offset[:, 0], np.full(len(offset), task.speed)], axis=1)
    return np.where(aligned[:, None], through, offset - (0.0, HOVER))


def _chase(task: Chase, world: World) -> np.ndarray:
    """To the first place of the disc that can be reached in time."""
    places = future(world)
    steps = np.arange(1, places.shape[1] + 1)
    reachable = distance(world.robot[:, None], places) - task.goal_radius / 2 <= task.speed * steps
    first = np.where(reachable.any(axis=1), reachable.argmax(axis=1), places.shape[1] - 1)
    return places[np.arange(len(places)), first] - world.robot


def _push(task: Push, world: World) -> np.ndarray:
    """Push from behind, steering sideways with a gain; go round the block otherwise."""
    contact = task.robot_radius + task.block_radius
    to_goal = world.goal - world.block
    ahead = to_goal / np.maximum(distance(world.goal, world.block), 1e-9)[:, None]
    side = np.stack([-ahead[:, 1], ahead[:, 0]], 1)
    offset = world.robot - world.block
    along = (offset * ahead)[:, 0] + (offset * ahead)[:, 1]
    across = (offset * side)[:, 0] + (offset * side)[:, 1]
    behind = (along < -0.6 * contact) & (np.abs(across) < 0.5 * contact)
    push = task.speed * ahead - (LATERAL_GAIN * across)[:, None] * side
    return np.where(behind[:, None], push, _round(offset, ahead, contact, task.speed))


def _round(offset: np.ndarray, ahead: np.ndarray, contact: float, speed: float) -> np.ndarray:
    """Along a circle around the block to the point behind it; straight where the block is not in the way."""
    reach = contact + 0.05
    radius = np.maximum(distance(offset, np.zeros(2)), 1e-9)
    out = offset / radius[:, None]
    turn = np.stack([-out[:, 1], out[:, 0]], 1)
    # Turn the way that shortens the angle to the point behind.
    turn = turn * np.where((turn * -ahead)[:, 0] + (turn * -ahead)[:, 1] >= 0, 1.0, -1.0)[:, None]
    around = turn * speed + out * (reach - radius)[:, None]
    straight = -ahead * reach - offset
    # How close the straight way comes to the block.
    squared = np.maximum(straight[:, 0] ** 2 + straight[:, 1] ** 2, 1e-12)
    t = np.clip(-((offset * straight)[:, 0] + (offset * straight)[:, 1]) / squared, 0, 1)
    gap = distance(offset + t[:, None] * straight, np.zeros(2))
    return np.where((gap > contact + 0.01)[:, None], straight, around)


def _shorten(move: np.ndarray, speed: float) -> np.ndarray:
    length = distance(move, np.zeros(2))
    return move * (speed / np.maximum(length, speed))[:, None]


def scene_requests(
    config: TabletopConfig, episodes: int, first_seed: int, sides: Sides = "both"
) -> tuple[Int[np.ndarray, " episodes"], Int[np.ndarray, " episodes"]]:
    """Which scenes to demonstrate, and on which side: (seeds, sides), one entry per episode.

    For Detour with ``sides="both"`` every seed comes twice in a row, left then right; "left", "right" and "near"
    are the unimodal experts and use every seed once. Tasks with one way only use every seed once, sides 0.

    Raises:
        ConfigError: no episodes, or an odd number where they come in pairs.
    """
    if episodes < 1:
        raise ConfigError(f"episodes: expected at least 1, got {episodes}")
    index = np.arange(episodes, dtype=np.int64)
    if not isinstance(config.task, Detour):
        return first_seed + index, np.zeros(episodes, np.int64)
    if sides == "both":
        if episodes % 2:
            raise ConfigError(f"episodes: expected an even number (each scene is shown once per side), got {episodes}")
        return first_seed + index // 2, np.where(index % 2 == 0, LEFT, RIGHT)
    return first_seed + index, np.full(episodes, {"left": LEFT, "near": NEAR, "right": RIGHT}[sides], np.int64)
