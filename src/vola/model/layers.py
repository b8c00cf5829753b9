"""The feed-forward layer and the small pieces that several parts share."""

from __future__ import annotations

from typing import Literal, final

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vola.errors import ConfigError

Activation = Literal["gelu", "geglu", "swiglu"]


@final
class FeedForward(nn.Module):
    """``gelu``: W2 gelu(W1 x). ``geglu`` / ``swiglu``: W2 (act(Wg x) * Wu x), both halves in one product.

    GELU is the tanh form (Gemma, SigLIP); SwiGLU is Llama's. Source: Shazeer 2020, "GLU variants".
    """

    def __init__(self, width: int, hidden: int, activation: Activation, bias: bool) -> None:
        super().__init__()
        if activation not in ("gelu", "geglu", "swiglu"):
            raise ConfigError(f"activation: expected 'gelu', 'geglu' or 'swiglu', got {activation!r}")
        self.activation = activation
        self.up = nn.Linear(width, hidden if activation == "gelu" else 2 * hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        h = self.up(x)
        if self.activation == "gelu":
            return self.down(F.gelu(h, approximate="tanh"))
        gate, value = h.chunk(2, dim=-1)
        act = F.gelu(gate, approximate="tanh") if self.activation == "geglu" else F.silu(gate)
        return self.down(act * value)


def count_parameters(module: nn.Module) -> int:
    """Number of trainable and frozen weights, shared ones once."""
    return sum(p.numel() for p in module.parameters())
