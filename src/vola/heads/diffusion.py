"""Denoising diffusion: a chunk is made of noise, one denoising step after the other (Diffusion Policy, Octo).

The papers count t = 0 .. train_steps - 1 with the noisiest last. The network is told tau = 1 - t / train_steps in (0,
1], so that 1 is data here as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vola.cite import Source
from vola.errors import ConfigError, expect_positive
from vola.heads.base import Cost, Drawn, Head, Loss, Part, noise_like_chunk
from vola.heads.noising import hold
from vola.heads.schedules import (
    Level,
    Prediction,
    Schedule,
    Spacing,
    Variance,
    add_noise,
    alphas_bar,
    ddim_step,
    ddpm_step,
    levels,
    limit,
    target,
)
from vola.model.backbone import Context

# Of the chunk's variance at the level where sampling starts from noise alone. Diffusion Policy's 100 and 10 steps have
# 2.4e-7 and 0.024 there.
LARGEST_REST = 0.1


@dataclass(frozen=True)
class Diffusion:
    """``train_steps`` levels of noise, ``steps`` of them visited when a chunk is drawn.

    sampler: "ddpm" (random steps, of ``variance`` "small" or "large") or "ddim" (deterministic for eta = 0).
    prediction: what the network answers: the noise "epsilon", the chunk "sample", or "v".
    schedule: "cosine" (any train_steps) or "linear" (1e-4 to 0.02, for about 1000).
    clip: the estimate of the chunk is held in [-clip, clip] at every step, 0 for no limit. It must not be smaller
        than the largest normalised action, or such actions can never be drawn: 1 goes with min-max scaling.
    spacing: which levels are visited, "leading" (the published systems) or "trailing" (for few steps).
    limit: x itself is held in [-limit, limit] after every step, 0 for no limit (Octo: 5).
    """

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Ho et al. 2020, Denoising diffusion probabilistic models",
            "eq. 7, 11 and 14",
            "unweighted squared error; large t is noise, tau = 1 - t / train_steps",
            "https://arxiv.org/abs/2006.11239",
        ),
        Source(
            "Chi et al. 2023, Diffusion policy: Visuomotor policy learning via action diffusion",
            "section 3.1",
            "squared-cosine schedule, clean estimate clipped",
            "https://arxiv.org/abs/2303.04137",
        ),
    )
    train_steps: int = 100
    steps: int = 10
    sampler: Literal["ddpm", "ddim"] = "ddim"
    prediction: Prediction = "epsilon"
    schedule: Schedule = "cosine"
    clip: float = 1.0
    eta: float = 0.0
    variance: Variance = "small"
    spacing: Spacing = "leading"
    limit: float = 0.0

    def __post_init__(self) -> None:
        expect_positive("diffusion", train_steps=self.train_steps, steps=self.steps)
        words = {"prediction": Prediction, "schedule": Schedule, "variance": Variance, "spacing": Spacing}
        for name, choices in (("sampler", ("ddpm", "ddim")), *((k, get_args(v)) for k, v in words.items())):
            if getattr(self, name) not in choices:
                raise ConfigError(f"diffusion: expected a {name} out of {choices}, got {getattr(self, name)!r}")
        if self.steps > self.train_steps:
            raise ConfigError(f"diffusion: expected steps <= train_steps, got {self.steps} and {self.train_steps}")
        for name in ("clip", "limit"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"diffusion: expected {name} >= 0 (0: no limit), got {getattr(self, name)}")
        if not 0 <= self.eta <= 1 or (self.eta and self.sampler == "ddpm"):
            raise ConfigError(f"diffusion: expected eta in [0, 1], and 0 unless sampler='ddim', got {self.eta}")
        if self.variance == "large" and self.sampler == "ddim":
            raise ConfigError("diffusion: variance='large' is of the ddpm sampler; ddim's randomness is eta")
        first = self.levels[0]
        if first.here > LARGEST_REST:
            raise ConfigError(
                f"diffusion: sampling starts from noise alone, and at its first level (t={first.t} of "
                f"{self.train_steps}) training has {first.here:.2f} of the chunk's variance left, {LARGEST_REST} at "
                "most is allowed. Use spacing='trailing', steps that divide train_steps, schedule='cosine', or more "
                "train_steps."
            )

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels that sampling visits."""
        return levels(self.schedule, self.train_steps, self.steps, self.spacing)


@final
class DiffusionHead(Head):
    """The rule of ``Diffusion`` over a network with time."""

    bars: Tensor

    def __init__(self, config: Diffusion, network: nn.Module, H: int, A: int) -> None:
        super().__init__()
        self.config, self.network, self.H, self.A = config, network, H, A
        bars = torch.from_numpy(alphas_bar(config.schedule, config.train_steps)).float()
        self.register_buffer("bars", bars, persistent=False)

    def loss(
        self, context: Context, actions: Float[Tensor, "B H A"], valid: Bool[Tensor, "B H"], rng: torch.Generator
    ) -> Loss:
        """Squared error of the prediction at a uniform t. What is fed in steps that are not valid says ``hold``."""
        config, device = self.config, actions.device
        actions = hold(actions, valid)
        noise = torch.randn(actions.shape, generator=rng, device=rng.device).to(device)
        t = torch.randint(0, config.train_steps, actions.shape[:1], generator=rng, device=rng.device).to(device)
        bar = self.bars[t][:, None, None]
        answer = self.network(context, add_noise(actions, noise, bar), 1 - t / config.train_steps).float()
        error = answer - target(actions, noise, bar, config.prediction)
        return Loss({"diffusion": Part(error.square(), valid[..., None])})

    def sample(self, context: Context, rngs: Sequence[np.random.Generator]) -> Drawn:
        config, device = self.config, context.segment.tokens.device
        x = noise_like_chunk(rngs, self.H, self.A, device)
        random = config.sampler == "ddpm" or config.eta > 0
        for level in config.levels:
            tau = torch.full((len(rngs),), 1 - level.t / config.train_steps, device=device)
            answer = self.network(context, x, tau).float()
            noise = noise_like_chunk(rngs, self.H, self.A, device) if random and level.there < 1 else None
            if config.sampler == "ddpm":
                x = ddpm_step(x, answer, level, config.prediction, config.clip, noise, config.variance)
            else:
                x = ddim_step(x, answer, level, config.prediction, config.clip, noise, config.eta)
            x = limit(x, config.limit)
        return Drawn(x)

    def cost(self) -> Cost:
        return Cost(serial=self.config.steps)
