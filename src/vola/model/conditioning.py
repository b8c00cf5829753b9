"""What reaches a head outside the trunk beside the chunk: the time features, and the check of what was plugged in."""

from __future__ import annotations

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vola.errors import ConfigError, InputError, expect_shape
from vola.model.networks import Ports
from vola.model.positions import time_code


def expect_inputs(
    ports: Ports,
    x: Float[Tensor, "B H A"],
    tau: Float[Tensor, " B"] | Float[Tensor, "B H"] | None,
    latent: Float[Tensor, "B Z"] | None,
) -> None:
    """Raises InputError unless the arguments of a network are those that its ports announce."""
    B = expect_shape("x", x, "B H A", H=ports.H, A=ports.A)["B"]
    for name, given, wanted in (("tau", tau, ports.time), ("latent", latent, ports.latent > 0)):
        if (given is not None) != wanted:
            raise InputError(
                f"network: expected {'a' if wanted else 'no'} {name}, got {'one' if given is not None else 'none'}. "
                "The network was built with other ports than those of the rule that calls it."
            )
    if tau is not None:
        per_step = ports.per_step_time and tau.ndim == 2
        expect_shape("tau", tau, "B H" if per_step else "B", B=B, H=ports.H)
    if latent is not None:
        expect_shape("latent", latent, "B Z", B=B, Z=ports.latent)


def zero_linear(width: int, out: int) -> nn.Linear:
    """An output map that starts at zero: an untrained network predicts zero velocity, or the mean action."""
    made = nn.Linear(width, out)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def noise_index(tau: Float[Tensor, "*shape"], time_steps: int) -> Float[Tensor, "*shape"]:
    """The time of a diffusion model with ``time_steps`` steps, large = noise: t = (1 - tau) time_steps.

    tau = 0 is noise and tau = 1 is data. The result is a real number; rules that draw whole steps set tau = 1 - t / K.
    """
    return (1 - tau.float()) * time_steps


def index_code(t: Float[Tensor, "*shape"], width: int) -> Float[Tensor, "*shape D"]:
    """sin, then cos, of t exp(-i ln(10000) / (D/2 - 1)), i = 0 .. D/2 - 1: periods from 2 pi to 20000 pi.

    Source: Diffusion Policy's ``SinusoidalPosEmb``. Unlike the Transformer's code, the last frequency is 1/10000.

    Raises:
        ConfigError: a width that is odd or below 4.
    """
    if width < 4 or width % 2:
        raise ConfigError(f"time code: expected an even width >= 4, half sines and half cosines, got {width}")
    half = width // 2
    i = torch.arange(half, device=t.device, dtype=torch.float32)
    angle = t.float()[..., None] * torch.exp(-math.log(10_000) / (half - 1) * i)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


@final
class FourierTime(nn.Module):
    """Octo's time features: cos, then sin, of 2 pi w t with trained frequencies w, then Dense x2, swish, Dense.

    t is the noise index in 0 .. ``time_steps``; frequencies start at N(0, 0.2^2). Source: Octo (arXiv 2405.12213) as
    released, ``FourierFeatures`` and the time encoder of its diffusion head.
    """

    def __init__(self, width: int, time_steps: int) -> None:
        super().__init__()
        self.time_steps = time_steps
        self.frequency = nn.Parameter(0.2 * torch.randn(width // 2))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, tau: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape D"]:
        angle = 2 * math.pi * noise_index(tau, self.time_steps)[..., None] * self.frequency.float()
        code = torch.cat([angle.cos(), angle.sin()], dim=-1).to(self.up.weight.dtype)
        return self.down(F.silu(self.up(code)))


@final
class TimeToken(nn.Module):
    """pi0's code of flow time (``positions.time_code``), then Dense, swish, Dense."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, tau: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape D"]:
        return self.down(F.silu(self.up(time_code(tau, self.width).to(self.up.weight.dtype))))
