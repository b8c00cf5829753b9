"""Conditional variational autoencoder: a latent vector says which of several good chunks is meant (ACT)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vola.cite import Source
from vola.errors import ConfigError, expect_positive
from vola.heads.base import Cost, Drawn, Head, Loss, Part
from vola.model import layouts
from vola.model.backbone import Context
from vola.model.positions import NoPositions, sinusoidal
from vola.model.trunk import Expert, ExpertConfig, Segment, TrunkConfig, run

Norm = Literal["l1", "l2"]


@dataclass(frozen=True)
class Cvae:
    """``latent`` Z numbers, drawn in training from a posterior that has seen the chunk.

    weight: of the KL divergence to N(0, I), beside the mean error per number.
    norm: "l1" (ACT) or "l2". draw: the latent of a new chunk, "zero" (ACT: one answer, no randomness) or "prior".
    encoder, depth, heads: the posterior's transformer, of head dim encoder.width / heads. Only training runs it.
    """

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Zhao et al. 2023, Learning fine-grained bimanual manipulation with low-cost hardware (ACT)",
            "section IV.C",
            "errors are means over the numbers that count (ACT's code divides by padded ones too); KL summed over Z",
            "https://arxiv.org/abs/2304.13705",
        ),
        Source(
            "Kingma & Welling 2014, Auto-encoding variational Bayes",
            "eq. 7 and appendix B",
            "",
            "https://arxiv.org/abs/1312.6114",
        ),
    )
    latent: int = 32
    weight: float = 10.0
    norm: Norm = "l1"
    draw: Literal["zero", "prior"] = "zero"
    encoder: ExpertConfig = ExpertConfig(64, 128, norm="layer", bias=True)
    depth: int = 4
    heads: int = 4

    def __post_init__(self) -> None:
        expect_positive("cvae", latent=self.latent, depth=self.depth, heads=self.heads)
        if not 0 <= self.weight < float("inf"):
            raise ConfigError(f"cvae: expected weight >= 0, got {self.weight}")
        if self.norm not in ("l1", "l2"):
            raise ConfigError(f"cvae: expected norm 'l1' or 'l2', got {self.norm!r}")
        if self.draw not in ("zero", "prior"):
            raise ConfigError(f"cvae: expected draw 'zero' or 'prior', got {self.draw!r}")
        if self.encoder.norm == "adaptive_rms":
            raise ConfigError("cvae: the posterior has nothing to adapt to; use norm 'layer' or 'rms'")
        if self.encoder.width % (2 * self.heads):
            raise ConfigError(
                f"cvae: expected encoder.width divisible by 2 heads = {2 * self.heads}, got {self.encoder.width}"
            )


@final
class Posterior(nn.Module):
    """Which latent a chunk comes from: mean and log variance ``B Z`` out of [cls | state | action_1 .. action_H].

    Everything sees everything; steps that are not valid are seen by nobody. Positions are sinusoidal, by place.
    Departs from ACT: pre-norm layers, positions added once.
    """

    def __init__(self, config: Cvae, H: int, A: int, S: int) -> None:
        super().__init__()
        width = config.encoder.width
        self.trunk = TrunkConfig(config.depth, config.heads, config.heads, width // config.heads, NoPositions())
        self.expert = Expert(self.trunk, config.encoder)
        self.cls = nn.Parameter(0.02 * torch.randn(width))
        self.state = nn.Linear(S, width) if S else None
        self.action = nn.Linear(A, width)
        self.leave = nn.Linear(width, 2 * config.latent)
        blocks = {"cls": 1, "state": 1, "action": H} if S else {"cls": 1, "action": H}
        self.layout = layouts.bidirectional(**blocks)

    def forward(
        self, state: Float[Tensor, "B S"], actions: Float[Tensor, "B H A"], valid: Bool[Tensor, "B H"]
    ) -> tuple[Float[Tensor, "B Z"], Float[Tensor, "B Z"]]:
        """``state`` is the newest one, normalised like the actions."""
        B = actions.shape[0]
        parts = [self.cls.expand(B, 1, -1)]
        if self.state is not None:
            parts.append(self.state(state)[:, None])
        parts.append(self.action(torch.where(valid[..., None], actions, 0)))
        tokens = torch.cat(parts, dim=1)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        tokens = tokens + sinusoidal(place, tokens.shape[-1]).to(tokens.dtype)
        always = valid.new_ones(B, tokens.shape[1] - valid.shape[1])
        segment = Segment(self.expert, self.layout.names, tokens, torch.cat([always, valid], dim=1))
        outputs, _ = run([segment], self.layout)
        mu, log_variance = self.leave(outputs[0][:, 0]).float().chunk(2, dim=-1)
        return mu, log_variance


def elbo_parts(
    prediction: Float[Tensor, "B H A"],
    actions: Float[Tensor, "B H A"],
    valid: Bool[Tensor, "B H"],
    mu: Float[Tensor, "B Z"],
    log_variance: Float[Tensor, "B Z"],
    norm: Norm,
    weight: float,
) -> dict[str, Part]:
    """The two terms of the negative evidence bound: the error per number, and the KL divergence per sample.

    KL(N(mu, sigma^2) || N(0, I)) = sum over Z of (mu^2 + sigma^2 - 1 - log sigma^2) / 2, in nats. A sample without
    any valid step counts in neither.
    """
    error = prediction - torch.where(valid[..., None], actions, 0)
    values = error.abs() if norm == "l1" else error.square()
    kl = (mu.square() + log_variance.exp() - 1 - log_variance).sum(dim=1) / 2
    return {norm: Part(values, valid[..., None]), "kl": Part(kl, valid.any(dim=1), weight)}


@final
class CvaeHead(Head):
    """The rule of ``Cvae`` over a network without time that takes a latent. S is the size of the state, 0 for none."""

    def __init__(self, config: Cvae, network: nn.Module, H: int, A: int, S: int) -> None:
        super().__init__()
        self.config, self.network, self.H, self.A = config, network, H, A
        self.posterior = Posterior(config, H, A, S)

    def _predict(self, context: Context, latent: Float[Tensor, "B Z"]) -> Float[Tensor, "B H A"]:
        zeros = context.segment.tokens.new_zeros(context.size, self.H, self.A)
        return self.network(context, zeros, None, latent).float()

    def loss(
        self, context: Context, actions: Float[Tensor, "B H A"], valid: Bool[Tensor, "B H"], rng: torch.Generator
    ) -> Loss:
        """The parts of ``elbo_parts`` with one latent per sample, mu + sigma noise."""
        config = self.config
        mu, log_variance = self.posterior(context.inputs.state[:, -1], actions, valid)
        noise = torch.randn(mu.shape, generator=rng, device=rng.device).to(mu)
        prediction = self._predict(context, mu + (log_variance / 2).exp() * noise)
        return Loss(elbo_parts(prediction, actions, valid, mu, log_variance, config.norm, config.weight))

    def sample(self, context: Context, rngs: Sequence[np.random.Generator]) -> Drawn:
        shape, device = self.config.latent, context.segment.tokens.device
        if self.config.draw == "zero":
            return Drawn(self._predict(context, torch.zeros(context.size, shape, device=device)))
        draws = np.stack([g.standard_normal(shape, dtype=np.float32) for g in rngs])
        return Drawn(self._predict(context, torch.from_numpy(draws).to(device)))

    def cost(self) -> Cost:
        return Cost(serial=1)
