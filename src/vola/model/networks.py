"""What computes a head: ``network(context, x, tau, latent) -> B H out``, one forward pass over a chunk.

A ``Ports`` record says what a rule plugs in: how many numbers per step come and go, whether there is a flow time, how
wide the latent is. Every network takes it at construction and refuses what it cannot do with the reason. This file
holds the record and pi0's network, an expert inside the trunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vola.errors import ConfigError
from vola.model.backbone import Context, Reader
from vola.model.positions import time_code
from vola.model.trunk import Expert, ExpertConfig, Segment, TrunkConfig


@dataclass(frozen=True)
class Ports:
    """What a rule and the backbone plug into a network.

    trunk, width: the shared trunk and the width D of memory and readout tokens.
    H, A: steps of a chunk, numbers per step that come in. out: numbers per step that go out (A, or A K logits).
    time: a flow or denoising time comes in, one per sample or, with ``per_step_time``, one per step of the chunk.
    noise: x carries something (else it is zeros). latent: width of the latent vector, 0 for none.
    """

    trunk: TrunkConfig
    width: int
    H: int
    A: int
    out: int
    time: bool = False
    per_step_time: bool = False
    noise: bool = False
    latent: int = 0


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

    def reader(self, length: int) -> Reader:
        """Keys and values of the prefix, and H action tokens beside it."""
        return Reader(action=length)

    def check(self, ports: Ports) -> None:
        """Raises ConfigError when the rule has a time and the network takes none, or the other way round."""
        if ports.time == (self.time == "none"):
            raise ConfigError(
                f"network: the rule has {'a' if ports.time else 'no'} flow time and ExpertNetwork has "
                f"time={self.time!r}; set network.time to {'concat' if ports.time else 'none'!r}"
            )


@final
class ExpertInTrunk(nn.Module):
    """The network of ``ExpertNetwork``: action -> token, suffix pass over the context, token -> action.

    The output map starts at zero: an untrained network predicts zero velocity (or the mean action). A latent is added
    to every action token; x is ignored where the rule feeds zeros.
    """

    def __init__(self, config: ExpertNetwork, ports: Ports) -> None:
        super().__init__()
        config.check(ports)
        width = config.expert.width
        self.config = config
        self.expert = Expert(ports.trunk, config.expert)
        self.enter = nn.Linear(ports.A, width) if ports.noise else None
        self.step = nn.Parameter(0.02 * torch.randn(ports.H, width))
        self.leave = nn.Linear(width, ports.out)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)
        if config.time == "concat":
            self.mix_in, self.mix_out = nn.Linear(2 * width, width), nn.Linear(width, width)
        elif config.time == "adaptive":
            self.mix_in, self.mix_out = nn.Linear(width, width), nn.Linear(width, width)
        self.latent = nn.Linear(ports.latent, width) if ports.latent else None

    def forward(
        self,
        context: Context,
        x: Float[Tensor, "B H A"],
        tau: Float[Tensor, " B"] | Float[Tensor, "B H"] | None,
        latent: Float[Tensor, "B Z"] | None = None,
    ) -> Float[Tensor, "B H out"]:
        """One pass; ``tau`` in [0, 1] (0 noise, 1 data), one per sample or one per step of the chunk.

        Raises:
            ConfigError: a time or latent where the ports have none, or the other way round.
        """
        if (tau is None) != (self.config.time == "none") or (latent is None) != (self.latent is None):
            raise ConfigError(
                f"network: built for time={self.config.time!r} and {'a' if self.latent else 'no'} latent, got "
                f"{'no' if tau is None else 'a'} time and {'no' if latent is None else 'a'} latent"
            )
        entered = self.step if self.enter is None else self.enter(x) + self.step
        tokens, condition = entered.expand(x.shape[0], -1, -1), None
        if self.latent is not None and latent is not None:
            tokens = tokens + self.latent(latent)[:, None]
        if tau is not None:
            code = time_code(tau, tokens.shape[-1]).to(tokens.dtype)
            if self.config.time == "concat":
                tokens = self._mix_time(tokens, code)
            else:
                condition = F.silu(self.mix_out(F.silu(self.mix_in(code))))
        return self.leave(context.read(Segment(self.expert, ("action",), tokens, condition=condition)))

    def _mix_time(self, tokens: Tensor, code: Tensor) -> Tensor:
        # mix_in(concat[token, code]) as two products: the code is often one row per sample, not one per step.
        token_half, code_half = self.mix_in.weight.chunk(2, dim=1)
        time = F.linear(code, code_half, self.mix_in.bias)
        mixed = F.linear(tokens, token_half) + (time if time.ndim == 3 else time[:, None])
        return self.mix_out(F.silu(mixed))
