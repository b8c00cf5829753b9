"""Token ids -> word tokens for the trunk and one sentence vector for FiLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from vola.errors import expect_positive
from vola.tokenizers.text import PAD, UNKNOWN


@dataclass(frozen=True)
class WordEmbedding:
    """A trainable vector per word, standard normal at the start.

    The sentence vector is the sum of the word vectors: it carries which words occur at full strength from the first
    step (their order reaches the trunk through the positions of the word tokens). Padding and unknown words start as
    zero vectors, so that they add nothing.
    """

    width: int

    def __post_init__(self) -> None:
        expect_positive("language", width=self.width)


@final
class WordEncoder(nn.Module):
    """The network of ``WordEmbedding``."""

    def __init__(self, config: WordEmbedding, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.width)
        with torch.no_grad():
            self.embedding.weight[[PAD, UNKNOWN]] = 0
        self.project = nn.Linear(config.width, width)

    def forward(
        self, ids: Int64[Tensor, "B N"], valid: Bool[Tensor, "B N"] | None
    ) -> tuple[Float[Tensor, "B N D"], Float[Tensor, "B E"]]:
        """Word tokens ``B N D`` and the sentence vector ``B E`` (E = config.width)."""
        words = self.embedding(ids)
        if valid is not None:
            words = words * valid[..., None]
        return self.project(words), words.sum(dim=1)

    @property
    def vocabulary(self) -> int:
        """V, words of a head included."""
        return int(self.embedding.num_embeddings)

    def tokens(self, ids: Int64[Tensor, "B N"]) -> Float[Tensor, "B N D"]:
        """Tokens of ids that a head writes itself."""
        return self.project(self.embedding(ids))

    def scores(self, hidden: Float[Tensor, "B N D"]) -> Float[Tensor, "B N V"]:
        """The product of each hidden vector with the token of every word (without the bias of the projection): the
        matrix of ``tokens`` used the other way round."""
        return (hidden @ self.project.weight) @ self.embedding.weight.T
