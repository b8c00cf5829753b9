"""Flow matching on the straight path. tau = 0 is noise, tau = 1 is data (openpi runs the other way).

    A_tau = (1 - tau) noise + tau A,      target velocity = A - noise,      A_{tau + 1/K} = A_tau + v / K

Source: Lipman et al. 2023 (conditional optimal-transport path, sigma_min = 0); pi0, section IV and appendix B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vola.cite import Source
from vola.errors import ConfigError
from vola.heads.base import Cost, Head, noise_like_chunk
from vola.model.backbone import Context


@dataclass(frozen=True)
class Flow:
    """``steps`` K of Euler integration. ``time`` is how training draws tau: "uniform", or "beta" = pi0's emphasis of
    noisy times, tau = 0.999 (1 - b) with b ~ Beta(1.5, 1)."""

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Lipman et al. 2023, Flow matching for generative modeling",
            "eq. 20, sigma_min = 0",
            "tau = 0 is noise, tau = 1 is data",
            "https://arxiv.org/abs/2210.02747",
        ),
        Source(
            "Black et al. 2024, pi0: A vision-language-action flow model for general robot control",
            "section IV, appendix B",
            "Beta(1.5, 1) emphasises noisy times; openpi's time runs the other way",
            "https://arxiv.org/abs/2410.24164",
        ),
    )
    steps: int = 10
    time: Literal["uniform", "beta"] = "uniform"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"flow: expected steps >= 1, got {self.steps}")
        if self.time not in ("uniform", "beta"):
            raise ConfigError(f"flow: expected time 'uniform' or 'beta', got {self.time!r}")


@final
class FlowHead(Head):
    """The rule of ``Flow`` over a network with time."""

    def __init__(self, config: Flow, network: nn.Module, H: int, A: int) -> None:
        super().__init__()
        self.config, self.network, self.H, self.A = config, network, H, A

    def draw_time(self, B: int, rng: torch.Generator) -> Float[Tensor, " B"]:
        """Training times. Beta(1.5, 1) is drawn by inverting its distribution function b^1.5."""
        u = torch.rand(B, generator=rng, device=rng.device)
        return u if self.config.time == "uniform" else 0.999 * (1 - u ** (1 / 1.5))

    def loss(self, context: Context, actions: Float[Tensor, "B H A"], rng: torch.Generator) -> Float[Tensor, "B H A"]:
        noise = torch.randn(actions.shape, generator=rng, device=rng.device).to(actions.device)
        tau = self.draw_time(actions.shape[0], rng).to(actions.device)
        x = torch.lerp(noise, actions, tau[:, None, None])
        return (self.network(context, x, tau).float() - (actions - noise)).square()

    def sample(self, context: Context, rngs: Sequence[np.random.Generator]) -> Float[Tensor, "B H A"]:
        K, device = self.config.steps, context.segment.tokens.device
        x = noise_like_chunk(rngs, self.H, self.A, device)
        for i in range(K):
            tau = torch.full((len(rngs),), i / K, device=device)
            x = x + self.network(context, x, tau).float() / K
        return x

    def cost(self) -> Cost:
        return Cost(serial=self.config.steps)
