"""Networks: what computes a head. ``network(context, x, tau) -> B H A``, one forward pass over a chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vola.errors import ConfigError
from vola.model.backbone import Context
from vola.model.positions import time_code
from vola.model.trunk import Expert, ExpertConfig, Segment, TrunkConfig


@dataclass(frozen=True)
class ExpertNetwork:
    """Action tokens inside the trunk, one per step of the chunk, read by an expert of their own (pi0).

    ``time`` says how flow time enters: "concat" joins it to each action and mixes both by an MLP (pi0), "adaptive"
    modulates every norm of the expert (pi0.5; needs norm="adaptive_rms"), "none" is for heads without a time.
    """

    expert: ExpertConfig
    time: Literal["concat", "adaptive", "none"] = "concat"

    def __post_init__(self) -> None:
        if (self.time == "adaptive") != (self.expert.norm == "adaptive_rms"):
            raise ConfigError(
                f"network: time='adaptive' and norm='adaptive_rms' go together, got time={self.time!r} and "
                f"norm={self.expert.norm!r}"
            )
        if self.time == "adaptive" and self.expert.condition != self.expert.width:
            raise ConfigError(f"network: adaptive time needs condition = width = {self.expert.width}")


@final
class ExpertInTrunk(nn.Module):
    """The network of ``ExpertNetwork``: action -> token, suffix pass over the context, token -> action.

    The output map starts at zero: an untrained network predicts zero velocity (or the mean action).
    """

    def __init__(self, config: ExpertNetwork, trunk: TrunkConfig, A: int, H: int) -> None:
        super().__init__()
        width = config.expert.width
        self.config, self.A, self.H = config, A, H
        self.expert = Expert(trunk, config.expert)
        self.enter = nn.Linear(A, width)
        self.step = nn.Parameter(0.02 * torch.randn(H, width))
        self.leave = nn.Linear(width, A)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)
        if config.time == "concat":
            self.mix_in, self.mix_out = nn.Linear(2 * width, width), nn.Linear(width, width)
        elif config.time == "adaptive":
            self.mix_in, self.mix_out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(
        self, context: Context, x: Float[Tensor, "B H A"], tau: Float[Tensor, " B"] | None
    ) -> Float[Tensor, "B H A"]:
        """One pass; ``tau`` in [0, 1] (0 noise, 1 data), or None for a network without time.

        Raises:
            ConfigError: the head gives a time and the network takes none, or the other way round.
        """
        if (tau is None) != (self.config.time == "none"):
            raise ConfigError(
                f"network: time={self.config.time!r}, but the head gave {'no' if tau is None else 'a'} time"
            )
        tokens, condition = self.enter(x) + self.step, None
        if tau is not None:
            code = time_code(tau, tokens.shape[-1]).to(tokens.dtype)
            if self.config.time == "concat":
                tokens = self._mix_time(tokens, code)
            else:
                condition = F.silu(self.mix_out(F.silu(self.mix_in(code))))
        return self.leave(context.read(Segment(self.expert, ("action",), tokens, condition=condition)))

    def _mix_time(self, tokens: Tensor, code: Tensor) -> Tensor:
        # mix_in(concat[token, code]) as two products: the code is one row per sample, not one per step.
        token_half, code_half = self.mix_in.weight.chunk(2, dim=1)
        mixed = F.linear(tokens, token_half) + F.linear(code, code_half, self.mix_in.bias)[:, None]
        return self.mix_out(F.silu(mixed))
