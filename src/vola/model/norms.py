"""LayerNorm, RMSNorm and adaptive RMSNorm behind one call: ``norm(x, condition) -> (y, gate)``.

``gate`` multiplies the residual branch; it is None for the plain norms.
"""

from __future__ import annotations

from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vola.errors import ConfigError

NormKind = Literal["layer", "rms", "adaptive_rms"]


@final
class LayerNorm(nn.Module):
    """Ba et al. 2016: subtract the mean, divide by the standard deviation, scale and shift."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "B N D"], condition: Tensor | None = None) -> tuple[Tensor, None]:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps), None


@final
class RMSNorm(nn.Module):
    """Zhang & Sennrich 2019: x / rms(x) * (1 + weight), weight starts at 0 (Gemma's convention)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "B N D"], condition: Tensor | None = None) -> tuple[Tensor, None]:
        return F.rms_norm(x, x.shape[-1:], (1 + self.weight).to(x.dtype), self.eps), None


@final
class AdaptiveRMSNorm(nn.Module):
    """pi0.5: scale, shift and gate are linear in a condition (the flow time): rms(x) * (1 + scale) + shift.

    The linear map starts at zero, so every residual branch starts closed (gate 0).
    """

    def __init__(self, width: int, condition: int, eps: float = 1e-6) -> None:
        super().__init__()
        if condition < 1:
            raise ConfigError("adaptive_rms: expected `condition` >= 1 (width of the conditioning vector), got 0")
        self.modulation = nn.Linear(condition, 3 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
        self.eps = eps

    def forward(self, x: Float[Tensor, "B N D"], condition: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if condition is None:
            raise ConfigError("adaptive_rms: expected a condition B D, got None; use norm='rms' without flow time")
        modulation = self.modulation(condition if condition.ndim == 3 else condition[:, None])
        scale, shift, gate = modulation.chunk(3, dim=-1)
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * (1 + scale) + shift, gate


def make_norm(kind: NormKind, width: int, condition: int = 0) -> nn.Module:
    """The norm that a config names."""
    match kind:
        case "layer":
            return LayerNorm(width)
        case "rms":
            return RMSNorm(width)
        case "adaptive_rms":
            return AdaptiveRMSNorm(width, condition)
    raise ConfigError(f"norm: expected 'layer', 'rms' or 'adaptive_rms', got {kind!r}")
