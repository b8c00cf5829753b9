"""Pictures for people: filmed rollouts, and many chunks sampled from one observation, drawn over its picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32, UInt8
from safetensors.numpy import save_file

from vola.envs.tabletop import RATE, Tabletop
from vola.rollout.rollout import Rollouts
from vola.types import Planner, select

SIZE = 256


@dataclass(frozen=True)
class Fan:
    """n chunks from one start state: paths ``n H 2`` in pixels (x right, y down) of ``image``."""

    image: UInt8[np.ndarray, "Y X 3"]
    paths: Float32[np.ndarray, "n H 2"]
    instruction: str


def fan(planner: Planner, scenes: Tabletop, seed: int, n: int = 24, noise_seed: int = 0) -> Fan:
    """Ask a planner n times at the same start state and draw its ways: displacements (m) are integrated, positions
    (``ActionSpec.kinds``) are the way themselves."""
    scenes.reset(np.array([seed]))
    observation = select(scenes.observe(), np.zeros(n, np.int64))
    chunk = planner.plan(observation, [np.random.default_rng([noise_seed, seed, i]) for i in range(n)])
    start = np.tile(scenes.world.robot[0], (n, 1, 1))
    absolute = set(scenes.spec.action.kinds) == {"position"}
    way = chunk.actions if absolute else start + np.cumsum(chunk.actions, axis=1)
    metres = np.concatenate([start, way], axis=1)
    pixels = np.stack([metres[..., 0] + 1, 1 - metres[..., 1]], axis=-1) * (SIZE / 2)
    return Fan(scenes.render(SIZE)[0], pixels.astype(np.float32), scenes.instructions[0])


def save_samples(path: Path, rollouts: Sequence[Rollouts], fans: Sequence[Mapping[str, Fan]]) -> None:
    """Write ``samples.safetensors`` (see ``vola.report.records``): the films of all rollouts, and per start state the
    fan of each planner by name."""
    tensors: dict[str, np.ndarray] = {}
    info: dict[str, dict[str, object]] = {}
    films = [(r.episodes[i], frames) for r in rollouts for i, frames in r.films.items()]
    for i, (episode, frames) in enumerate(films):
        tensors[f"rollout/{i}/frames"] = frames
        info[f"rollout/{i}"] = {
            "policy": episode.policy,
            "instruction": episode.instruction,
            "success": episode.success,
            "failure": episode.failure,
            "rate": RATE,
        }
    for i, group in enumerate(fans):
        for name, one in group.items():
            tensors[f"fan/{i}/{name}/image"], tensors[f"fan/{i}/{name}/paths"] = one.image, one.paths
            info[f"fan/{i}/{name}"] = {"instruction": one.instruction}
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, path, {"info": json.dumps(info)})
