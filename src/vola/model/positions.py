"""Where a token stands: rotary, sinusoidal and learned positions, and none.

Rotary positions enter attention by turning queries and keys; the other two are added to the tokens before the
first layer. Positions are counted over valid tokens, so an invalid token does not push later ones away (openpi).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vola.cite import Source
from vola.errors import ConfigError, expect_positive


@dataclass(frozen=True)
class Rotary:
    """RoPE (Su et al. 2021, eq. 34): pair (i, i + d/2) turns by position * base^(-2i/d) (Gemma/Llama half-split)."""

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Su et al. 2021, RoFormer: enhanced transformer with rotary position embedding",
            "eq. 34",
            "half-split pairs (i, i + d/2)",
            "https://arxiv.org/abs/2104.09864",
        ),
    )
    base: float = 10_000.0


@dataclass(frozen=True)
class Sinusoidal:
    """Added sines and cosines (Vaswani et al. 2017, section 3.5), first half sine, second half cosine."""

    base: float = 10_000.0


@dataclass(frozen=True)
class Learned:
    """An added trainable vector for each of ``length`` positions; a later position is refused."""

    length: int

    def __post_init__(self) -> None:
        expect_positive("learned positions", length=self.length)


@dataclass(frozen=True)
class NoPositions:
    """Attention sees a set, apart from what the tokens themselves carry."""


Positions = Rotary | Sinusoidal | Learned | NoPositions


def rotary_angles(position: Int64[Tensor, "B N"], d: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each ``B 1 N d/2``, that ``rotate`` needs; computed once for all layers."""
    frequency = base ** (-torch.arange(0, d, 2, device=position.device, dtype=torch.float32) / d)
    angle = position[:, None, :, None].to(torch.float32) * frequency
    return angle.cos(), angle.sin()


def rotate(x: Float[Tensor, "B h N d"], angles: tuple[Tensor, Tensor]) -> Float[Tensor, "B h N d"]:
    """Turn every half-split pair of ``x`` by its angle; keeps norms, in the dtype of ``x``."""
    cos, sin = (a.to(x.dtype) for a in angles)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def sinusoidal(position: Tensor, width: int, base: float = 10_000.0) -> Float[Tensor, "*shape D"]:
    """Sinusoidal code of any real-valued positions: D/2 sines, then D/2 cosines, periods 2 pi base^(2i/D).

    Raises:
        ConfigError: an odd width.
    """
    _check_even(width)
    frequency = base ** (-torch.arange(0, width, 2, device=position.device, dtype=torch.float32) / width)
    angle = position[..., None].to(torch.float32) * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def time_code(
    tau: Float[Tensor, "*shape"], width: int, shortest: float = 4e-3, longest: float = 4.0
) -> Float[Tensor, "*shape D"]:
    """Code of flow time: sin and cos of 2 pi tau / period, periods geometric from ``shortest`` to ``longest``.

    Source: pi0 (openpi ``posemb_sincos``), width/2 periods, sines first.

    Raises:
        ConfigError: an odd width.
    """
    _check_even(width)
    steps = torch.linspace(0.0, 1.0, width // 2, device=tau.device, dtype=torch.float32)
    period = shortest * (longest / shortest) ** steps
    angle = tau[..., None].to(torch.float32) * (2 * math.pi / period)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def _check_even(width: int) -> None:
    if width % 2:
        raise ConfigError(f"positions: expected an even width, half sines and half cosines, got {width}")
