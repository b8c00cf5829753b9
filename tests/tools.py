"""Small data and systems that several tests share: everything at size 8."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vola.data.episodes import Episode, MemoryDataset
from vola.data.windows import Windows
from vola.fit import Fitted, fit
from vola.heads.pairing import tokenizer_config
from vola.policy import Policy
from vola.system import System
from vola.systems import pi0, regression
from vola.types import ActionSpec, Batch, CameraSpec, RobotSpec, StateSpec, fake
from vola.variants import HEADS, with_head

SPEC = RobotSpec(
    (CameraSpec("top", 8, 8), CameraSpec("wrist", 8, 8)),
    StateSpec(("x", "y", "grip"), ("m", "m", "m")),
    ActionSpec(("dx", "dy"), ("m", "m"), ("delta", "delta"), 10.0),
)
TEXTS = ("push the red disc", "go to the blue ring")


def dataset(lengths: tuple[int, ...] = (7, 5, 9, 6), seed: int = 0, spec: RobotSpec = SPEC) -> MemoryDataset:
    rng = np.random.default_rng(seed)
    return MemoryDataset(
        spec,
        spec.action.rate,
        tuple(Episode(i, n, TEXTS[i % 2]) for i, n in enumerate(lengths)),
        {
            "state": [rng.standard_normal((n, spec.state.size)).astype(np.float32) for n in lengths],
            "action": [rng.standard_normal((n, spec.action.size)).astype(np.float32) for n in lengths],
        },
        {
            c.name: [rng.integers(0, 256, (n, 3, c.height, c.width), dtype=np.uint8) for n in lengths]
            for c in spec.cameras
        },
    )


def system(name: str = "pi0", **changes: object) -> System:
    """A tiny system: that of a system file, or pi0's with the head of that name."""
    files = {"pi0": pi0, "regression": regression}
    made = with_head(pi0.tiny(SPEC), name) if name in HEADS else files[name].tiny(SPEC)
    return made.override({k.replace("__", "."): v for k, v in changes.items()})


def fitted(made: System, data: MemoryDataset | None = None) -> Fitted:
    data = data or dataset(spec=made.robot)
    tokens = tokenizer_config(made.head)
    return fit(data, [e.index for e in data.episodes], made.H, made.transforms, tokens, made.normalise_actions)


def windows(made: System, data: MemoryDataset | None = None) -> Windows:
    data = data or dataset(spec=made.robot)
    return Windows(data, [e.index for e in data.episodes], made.T, made.H, resize=made.image_size)


def policy(made: System) -> Policy:
    """A policy with every weight away from its initial value, zero-initialised ones included."""
    import torch

    built = made.build(fitted(made))
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in built.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=rng))
    return built.eval()


def batch(made: System, B: int = 3, seed: int = 0) -> Batch:
    spec = replace(
        made.robot,
        cameras=tuple(replace(c, height=made.image_size[0], width=made.image_size[1]) for c in made.robot.cameras),
    )
    return fake(spec, B, made.T, made.H, np.random.default_rng(seed))


def rngs(B: int, seed: int = 0) -> list[np.random.Generator]:
    return [np.random.default_rng([seed, b]) for b in range(B)]
