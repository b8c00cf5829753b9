"""Actions as bins: one of K classes per number of the chunk.

``Categorical`` predicts all numbers of a chunk at once, each for itself (RT-1, and OpenVLA-OFT's discrete variant): it
can say "left or right" for every number but not that two numbers agree. ``Autoregressive`` writes them one after the
other, each given those before it, and can (RT-2, OpenVLA).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from vola.cite import Source
from vola.data.stats import Normaliser
from vola.heads.base import Cost, Drawn, Floor, Head, Loss, Part
from vola.heads.tokens import Pick, check_pick, cross_entropy, pick_ids, write
from vola.model.backbone import Context
from vola.model.token_networks import TokenNetwork
from vola.tokenizers.actions import ActionTokenizer, Tokens
from vola.tokenizers.bins import QuantileBins, UniformBins


@dataclass(frozen=True)
class Categorical:
    """K bins per number, all numbers in one pass, independently given the observation. ``pick``: how a bin is chosen.

    The network gives K scores per number.
    """

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Brohan et al. 2022, RT-1: Robotics transformer for real-world control at scale",
            "section 5.1",
            "256 bins per dimension; independent given the observation, as in the released code",
            "https://arxiv.org/abs/2212.06817",
        ),
    )
    bins: UniformBins | QuantileBins = UniformBins(256)
    pick: Pick = "argmax"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_pick("categorical", self.pick, self.temperature)


@dataclass(frozen=True)
class Autoregressive:
    """K bins per number, written one after the other in the order (h, a): step by step, dimension by dimension."""

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Kim et al. 2024, OpenVLA: An open-source vision-language-action model",
            "section 3.2",
            "one token per number of the action",
            "https://arxiv.org/abs/2406.09246",
        ),
    )
    bins: UniformBins | QuantileBins = UniformBins(256)
    pick: Pick = "argmax"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_pick("autoregressive", self.pick, self.temperature)


def to_ids(tokenizer: ActionTokenizer, actions: Float[Tensor, "B H A"], valid: Bool[Tensor, "B H"]) -> Tensor:
    """Bins of a chunk as ids ``B H*A``."""
    tokens = tokenizer.encode(actions.cpu().numpy(), valid.cpu().numpy())
    return torch.from_numpy(tokens.ids).to(actions.device)


def from_ids(tokenizer: ActionTokenizer, ids: Int64[Tensor, "B L"], H: int, A: int) -> Drawn:
    """The chunk of bins; every id means something, so nothing can be malformed."""
    rows = ids.cpu().numpy()
    decoded = tokenizer.decode(Tokens(rows, np.ones(rows.shape, bool)), H, A)
    return Drawn(torch.from_numpy(decoded.chunks).to(ids.device))


def quantisation_floor(tokenizer: ActionTokenizer, normaliser: Normaliser) -> Floor:
    """The tokenizer's floor in the units of the normaliser, per action dimension."""
    rms, worst = tokenizer.floor()
    return Floor(rms * normaliser.scale, worst * normaliser.scale)


@final
class CategoricalHead(Head):
    """The rule of ``Categorical`` over a network with K scores per number."""

    def __init__(self, config: Categorical, network: nn.Module, H: int, A: int, tokenizer: ActionTokenizer) -> None:
        super().__init__()
        self.config, self.network, self.H, self.A, self.tokenizer = config, network, H, A, tokenizer

    def _scores(self, context: Context) -> Float[Tensor, "B L K"]:
        zeros = context.segment.tokens.new_zeros(context.size, self.H, self.A)
        return self.network(context, zeros, None).float().view(context.size, self.H * self.A, -1)

    def loss(
        self, context: Context, actions: Float[Tensor, "B H A"], valid: Bool[Tensor, "B H"], rng: torch.Generator
    ) -> Loss:
        values = cross_entropy(self._scores(context), to_ids(self.tokenizer, actions, valid))
        return Loss({"cross_entropy": Part(values.view(actions.shape), valid[..., None])})

    def sample(self, context: Context, rngs: Sequence[np.random.Generator]) -> Drawn:
        scores = self._scores(context)
        draws = np.stack([g.random(self.H * self.A) for g in rngs])
        uniform = torch.from_numpy(draws).to(scores.device)
        ids = pick_ids(scores, self.config.pick, self.config.temperature, uniform)
        return from_ids(self.tokenizer, ids, self.H, self.A)

    def cost(self) -> Cost:
        return Cost(serial=1)

    def floor(self, normaliser: Normaliser) -> Floor:
        return quantisation_floor(self.tokenizer, normaliser)

    def log_prob(
        self, context: Context, actions: Float[Tensor, "B H A"], valid: Bool[Tensor, "B H"], rng: torch.Generator
    ) -> Float[Tensor, " B"]:
        """Exact log probability (nats) of the bins that the valid actions fall into, at temperature 1."""
        part = self.loss(context, actions, valid, rng).main
        return -(part.values * part.valid).sum(dim=(1, 2))


@final
class AutoregressiveHead(Head):
    """The rule of ``Autoregressive`` over a token network."""

    network: TokenNetwork

    def __init__(
        self, config: Autoregressive, network: TokenNetwork, H: int, A: int, tokenizer: ActionTokenizer
    ) -> None:
        super().__init__()
        self.config, self.network, self.H, self.A, self.tokenizer = config, network, H, A, tokenizer

    def loss(
        self, context: Context, actions: Float[Tensor, "B H A"], valid: Bool[Tensor, "B H"], rng: torch.Generator
    ) -> Loss:
        ids = to_ids(self.tokenizer, actions, valid)
        values = cross_entropy(self.network(context, ids), self.network.column(context, ids))
        return Loss({"cross_entropy": Part(values.view(actions.shape), valid[..., None])})

    def sample(self, context: Context, rngs: Sequence[np.random.Generator]) -> Drawn:
        tokens = write(self.network, context, rngs, self.config.pick, self.config.temperature, None)
        device = context.segment.tokens.device
        return from_ids(self.tokenizer, torch.from_numpy(tokens.ids).to(device), self.H, self.A)

    def cost(self) -> Cost:
        return Cost(serial=self.H * self.A)

    def floor(self, normaliser: Normaliser) -> Floor:
        return quantisation_floor(self.tokenizer, normaliser)

    def log_prob(
        self, context: Context, actions: Float[Tensor, "B H A"], valid: Bool[Tensor, "B H"], rng: torch.Generator
    ) -> Float[Tensor, " B"]:
        """Exact log probability (nats) of the bins that the valid actions fall into, at temperature 1."""
        part = self.loss(context, actions, valid, rng).main
        return -(part.values * part.valid).sum(dim=(1, 2))
