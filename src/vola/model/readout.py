"""Octo's head network: a residual MLP over the mean of the readout tokens that writes the whole chunk at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vola.cite import Source
from vola.errors import ConfigError, expect_positive
from vola.model.backbone import Context, Reader
from vola.model.conditioning import FourierTime, expect_inputs, zero_linear
from vola.model.networks import Ports


@dataclass(frozen=True)
class ReadoutMLP:
    """``readouts`` tokens collect what the head needs, their mean feeds ``blocks`` residual blocks of ``width``.

    Time enters as ``time_width`` learned Fourier features of the noise index (1 - tau) ``time_steps``. Where a rule has
    one time per step of the chunk, every step brings its own features.
    """

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Octo Model Team 2024, Octo: An open-source generalist robot policy",
            "section III-A, diffusion head of the released code",
            "time features of (1 - tau) time_steps; no dropout",
            "https://arxiv.org/abs/2405.12213",
        ),
        Source(
            "Kim et al. 2025, Fine-tuning vision-language-action models: optimizing speed and success",
            "section IV, MLP-ResNet",
            "",
            "https://arxiv.org/abs/2502.19645",
        ),
    )
    readouts: int = 1
    width: int = 256
    blocks: int = 3
    time_width: int = 32
    time_steps: int = 20

    def __post_init__(self) -> None:
        sizes = {"readouts": self.readouts, "width": self.width, "blocks": self.blocks}
        expect_positive("ReadoutMLP", **sizes, time_width=self.time_width, time_steps=self.time_steps)
        if self.time_width % 2:
            raise ConfigError(
                f"ReadoutMLP: expected an even time_width, half cosines and half sines, got {self.time_width}"
            )

    def reader(self, length: int) -> Reader:
        """The outputs of ``readouts`` tokens."""
        return Reader(readouts=self.readouts, outputs=True)

    def check(self, ports: Ports) -> None:
        """Every rule works with this network: one output row per chunk knows all steps, and any time can be told."""


@final
class ResidualBlock(nn.Module):
    """x + Dense(swish(Dense x4 (LayerNorm(x)))); Flax's epsilon, 1e-6."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
        return x + self.down(F.silu(self.up(self.norm(x))))


@final
class ReadoutNetwork(nn.Module):
    """The network of ``ReadoutMLP``: [mean readout, x, time features, latent] -> width -> blocks -> swish -> H x out.

    x is left out where the rule feeds zeros, time features and latent where there are none. The output map starts at
    zero.
    """

    def __init__(self, config: ReadoutMLP, ports: Ports) -> None:
        super().__init__()
        config.check(ports)
        self.ports = ports
        times = ports.H if ports.per_step_time else 1
        entering = ports.width + ports.latent
        entering += ports.H * ports.A if ports.noise else 0
        entering += times * config.time_width if ports.time else 0
        if ports.time:
            self.time = FourierTime(config.time_width, config.time_steps)
        self.enter = nn.Linear(entering, config.width)
        self.blocks = nn.Sequential(*(ResidualBlock(config.width) for _ in range(config.blocks)))
        self.leave = zero_linear(config.width, ports.H * ports.out)

    def forward(
        self,
        context: Context,
        x: Float[Tensor, "B H A"],
        tau: Float[Tensor, " B"] | Float[Tensor, "B H"] | None,
        latent: Float[Tensor, "B Z"] | None = None,
    ) -> Float[Tensor, "B H out"]:
        """One pass. Raises InputError when x, tau or latent are not what the ports announce."""
        expect_inputs(self.ports, x, tau, latent)
        parts = [context.readout.mean(dim=1)]
        if self.ports.noise:
            parts.append(x.flatten(1))
        if tau is not None:
            if self.ports.per_step_time and tau.ndim == 1:
                tau = tau[:, None].expand(-1, self.ports.H)
            parts.append(self.time(tau).flatten(1))
        if latent is not None:
            parts.append(latent)
        hidden = self.enter(torch.cat([p.to(parts[0].dtype) for p in parts], dim=1))
        return self.leave(F.silu(self.blocks(hidden))).unflatten(1, (self.ports.H, self.ports.out))
