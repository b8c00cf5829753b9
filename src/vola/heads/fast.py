"""FAST: a chunk is a sentence of DCT coefficients, compressed by BPE and written token by token (pi0-FAST)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vola.cite import Source
from vola.data.stats import Normaliser
from vola.heads.base import Cost, Drawn, Floor, Head, Loss, Part
from vola.heads.categorical import quantisation_floor
from vola.heads.tokens import Pick, check_pick, cross_entropy, write
from vola.model.backbone import Context
from vola.model.token_networks import TokenNetwork
from vola.tokenizers.actions import ActionTokenizer, Tokens
from vola.tokenizers.fast import FastConfig


@dataclass(frozen=True)
class Fast:
    """Autoregressive FAST tokens. ``tokens`` are the tokenizer's settings; it is fitted on the training episodes."""

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Pertsch et al. 2025, FAST: Efficient action tokenization for vision-language-action models",
            "section V",
            "(frequency, dimension) order; greedy decoding by default, as pi0-FAST",
            "https://arxiv.org/abs/2501.09747",
        ),
    )
    tokens: FastConfig = FastConfig()
    pick: Pick = "argmax"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_pick("fast", self.pick, self.temperature)


@final
class FastHead(Head):
    """The rule of ``Fast`` over a token network. A sequence that does not decode is reported in ``Drawn.malformed``."""

    network: TokenNetwork

    def __init__(self, config: Fast, network: TokenNetwork, H: int, A: int, tokenizer: ActionTokenizer) -> None:
        super().__init__()
        self.config, self.network, self.H, self.A, self.tokenizer = config, network, H, A, tokenizer

    def loss(
        self, context: Context, actions: Float[Tensor, "B H A"], valid: Bool[Tensor, "B H"], rng: torch.Generator
    ) -> Loss:
        """Cross-entropy ``B L`` per token. The steps that are not valid repeat the last valid one in the tokens."""
        tokens = self.tokenizer.encode(actions.cpu().numpy(), valid.cpu().numpy())
        ids = torch.from_numpy(tokens.ids).to(actions.device)[:, : self.network.length]
        counts = torch.from_numpy(tokens.valid).to(actions.device)[:, : self.network.length]
        values = cross_entropy(self.network(context, ids), self.network.column(context, ids))
        return Loss({"cross_entropy": Part(values, counts & valid.any(dim=1, keepdim=True))})

    def sample(self, context: Context, rngs: Sequence[np.random.Generator]) -> Drawn:
        config = self.config
        tokens = write(self.network, context, rngs, config.pick, config.temperature, self.tokenizer.end)
        decoded = self.tokenizer.decode(Tokens(tokens.ids, tokens.valid), self.H, self.A)
        decided = decoded.decided
        chunks = np.where(decided[:, None, None], decoded.chunks, 0)  # what an undecided row holds, the policy says
        device = context.segment.tokens.device
        steps = np.repeat(decided[:, None], self.H, axis=1)
        actions, malformed, valid = (torch.from_numpy(x).to(device) for x in (chunks, decoded.malformed, steps))
        return Drawn(actions, malformed, valid)

    def cost(self) -> Cost:
        """At most: a chunk ends with its end token."""
        return Cost(serial=self.network.length)

    def floor(self, normaliser: Normaliser) -> Floor:
        return quantisation_floor(self.tokenizer, normaliser)

    def log_prob(
        self, context: Context, actions: Float[Tensor, "B H A"], valid: Bool[Tensor, "B H"], rng: torch.Generator
    ) -> Float[Tensor, " B"]:
        """Exact log probability (nats) of the chunk's token sequence, end token included, at temperature 1."""
        part = self.loss(context, actions, valid, rng).main
        return -(part.values * part.valid).sum(dim=1)
