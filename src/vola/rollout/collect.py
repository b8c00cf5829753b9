"""Demonstrations of the built-in tasks: the expert drives, its intended (clean) action is the label.

Execution noise moves the robot off the expert's line, so that the data show how to come back (DART's idea, Laskey et
al. 2017). Bimodal tasks are demonstrated in pairs, each scene once per side; a scene whose expert fails is left out
whole, so that pairs stay pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, UInt8

from vola.envs.experts import Expert, Sides, scene_requests
from vola.envs.tabletop import Tabletop, TabletopConfig

# Scenes that run side by side; results do not depend on it.
SIDE_BY_SIDE = 128


@dataclass(frozen=True)
class Demonstration:
    """One episode: images per camera uint8 ``L Y X 3``, state ``L S``, action ``L A``, all at rate Hz."""

    seed: int
    images: dict[str, UInt8[np.ndarray, "L Y X 3"]]
    state: Float32[np.ndarray, "L S"]
    action: Float32[np.ndarray, "L A"]
    instruction: str


def demonstrate(
    config: TabletopConfig, episodes: int, first_seed: int = 0, sides: Sides = "both"
) -> Iterator[Demonstration]:
    """Demonstrations of ``episodes`` requests, in order of their seeds; failed scenes are missing.

    Args:
        config: task and disturbance, e.g. ``noise=0.15``.
        sides: for the bimodal task: "both" pairs every scene; "left", "right", "near" make it unimodal.

    Raises:
        ConfigError: no episodes, or an odd number where they come in pairs.
    """
    seeds, turns = scene_requests(config, episodes, first_seed, sides)
    for start in range(0, len(seeds), SIDE_BY_SIDE):
        part = slice(start, start + SIDE_BY_SIDE)
        made = _drive(Tabletop(config), seeds[part], turns[part])
        failed = {int(seed) for seed, demonstration in zip(seeds[part], made, strict=True) if demonstration is None}
        yield from (d for d in made if d is not None and d.seed not in failed)


def _drive(table: Tabletop, seeds: np.ndarray, sides: np.ndarray) -> list[Demonstration | None]:
    """One demonstration per seed, None where the expert failed."""
    table.reset(seeds)
    expert = Expert(table, sides)
    n, camera = len(seeds), table.spec.cameras[0].name
    images: list[list[np.ndarray]] = [[] for _ in range(n)]
    states: list[list[np.ndarray]] = [[] for _ in range(n)]
    actions: list[list[np.ndarray]] = [[] for _ in range(n)]
    while not table.done.all():
        open_ = np.flatnonzero(~table.done)
        action = expert.act().astype(np.float32)
        for i, picture in zip(open_, table.render(rows=open_), strict=True):
            images[i].append(picture)
            states[i].append(table.state[i])
            actions[i].append(action[i])
        table.step(action)
    return [
        Demonstration(
            int(seeds[i]), {camera: np.stack(images[i])}, np.stack(states[i]), np.stack(actions[i]), instruction
        )
        if table.success[i]
        else None
        for i, instruction in enumerate(table.instructions)
    ]
