"""Networks that write a chunk as tokens, one after the other, with the trunk as a language model.

``network(context, ids)`` scores a whole sequence in one pass (teacher forcing); ``step`` and ``append`` write one token
at a time with a key/value cache that grows. Both run under the same layout, so they agree up to rounding.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vola.cite import Source
from vola.model.attention import Cache
from vola.model.backbone import Context, Reader
from vola.model.layout import Causal
from vola.model.layouts import writing
from vola.model.trunk import Expert, ExpertConfig, Segment, TrunkConfig


@dataclass(frozen=True)
class TokenPorts:
    """What a token rule plugs in: the shared trunk, the prefix expert's width, L tokens at most out of K."""

    trunk: TrunkConfig
    width: int
    length: int
    vocabulary: int


@dataclass(frozen=True)
class TokenExpert:
    """Action tokens with a vocabulary and an expert of their own inside the trunk."""

    expert: ExpertConfig

    def reader(self, length: int, vocabulary: int) -> Reader:
        """Keys and values of the prefix, and a causal block of L tokens beside it."""
        return Reader(action=length, inner=Causal())


@dataclass(frozen=True)
class TextTokens:
    """Action tokens are words: the last K ids of the text vocabulary, written by the expert that reads the prefix, with
    one matrix for embedding and output.

    id = V - 1 - bin, as OpenVLA counts from the end of its vocabulary. The loss is over all V words; writing is
    restricted to the K action words (RT-2). Logits are divided by sqrt(D), T5's scale for a shared matrix.
    """

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Zitkovich et al. 2023, RT-2: Vision-language-action models transfer web knowledge to robotic control",
            "section 3.2",
            "actions as text tokens; decoding restricted to them on robot prompts",
            "https://arxiv.org/abs/2307.15818",
        ),
        Source(
            "Kim et al. 2024, OpenVLA: An open-source vision-language-action model",
            "section 3.2",
            "the last 256 ids of the vocabulary, counted from the end",
            "https://arxiv.org/abs/2406.09246",
        ),
    )

    def reader(self, length: int, vocabulary: int) -> Reader:
        """The prefix expert's outputs, a causal block of L tokens, and K further words."""
        return Reader(action=length, inner=Causal(), outputs=True, words=vocabulary)


@dataclass(frozen=True, eq=False)
class Writing:
    """A sequence being written: the ids so far, and the keys and values of what came before the next one."""

    ids: Int64[Tensor, "B n"]
    cache: Cache | None


class TokenNetwork(nn.Module):
    """A causal model of action tokens given a context. Abstract; concrete networks are final."""

    def __init__(self, ports: TokenPorts, width: int) -> None:
        super().__init__()
        self.length, self.vocabulary = ports.length, ports.vocabulary
        self.start = nn.Parameter(0.02 * torch.randn(width))

    @abstractmethod
    def _expert(self, context: Context) -> Expert: ...

    @abstractmethod
    def _embed(self, context: Context, ids: Int64[Tensor, "B n"]) -> Float[Tensor, "B n D"]: ...

    @abstractmethod
    def _score(self, context: Context, hidden: Float[Tensor, "B n D"]) -> Float[Tensor, "B n V"]: ...

    def column(self, context: Context, ids: Int64[Tensor, "B L"]) -> Int64[Tensor, "B L"]:
        """Where the action token of each id stands in the scores: they may cover other words too."""
        return ids

    def choices(self, scores: Float[Tensor, "B V"]) -> Float[Tensor, "B K"]:
        """The scores of the K action tokens alone, in the order of their ids."""
        return scores

    def forward(self, context: Context, ids: Int64[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        """Scores of every token given those before it; ``scores[:, i]`` does not depend on ``ids[:, i:]``."""
        layout = writing(context.layout, "action", ids.shape[1], 0)
        start = self.start.to(context.segment.tokens.dtype).expand(ids.shape[0], 1, -1)
        tokens = torch.cat([start, self._embed(context, ids[:, :-1])], dim=1)
        return self._score(context, context.read(Segment(self._expert(context), ("action",), tokens), layout))

    def begin(self, context: Context) -> Writing:
        """Nothing is written yet."""
        empty = torch.zeros(context.size, 0, dtype=torch.long, device=context.segment.tokens.device)
        return Writing(empty, context.cache)

    def step(self, context: Context, state: Writing) -> tuple[Float[Tensor, "B V"], Writing]:
        """Scores of the next token. Without a cache the whole sequence is scored again."""
        n = state.ids.shape[1]
        if state.cache is None:
            ids = torch.cat([state.ids, state.ids.new_zeros(context.size, 1)], dim=1)
            return self(context, ids)[:, -1], state
        layout = writing(context.layout, "action", n, 1)
        token = self._embed(context, state.ids[:, -1:]) if n else self.start.expand(context.size, 1, -1)
        suffix = Segment(self._expert(context), ("next",), token)
        hidden, cache = context.extend(suffix, layout, state.cache)
        written = tuple("action" if c == "next" else c for c in cache.columns if c != "action")
        # What was "next" is now the last of n + 1 written tokens.
        length = writing(context.layout, "action", n + 1, 0)
        return self._score(context, hidden)[:, -1], replace(state, cache=replace(cache, layout=length, columns=written))

    @staticmethod
    def append(state: Writing, ids: Int64[Tensor, " B"]) -> Writing:
        """The sequence with one more token."""
        return replace(state, ids=torch.cat([state.ids, ids[:, None]], dim=1))


@final
class TokensInTrunk(TokenNetwork):
    """The network of ``TokenExpert``. Output starts at zero: an untrained network is uniform over its vocabulary."""

    def __init__(self, config: TokenExpert, ports: TokenPorts) -> None:
        super().__init__(ports, config.expert.width)
        self.expert = Expert(ports.trunk, config.expert)
        self.embedding = nn.Embedding(ports.vocabulary, config.expert.width)
        self.leave = nn.Linear(config.expert.width, ports.vocabulary)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def _expert(self, context: Context) -> Expert:
        return self.expert

    def _embed(self, context: Context, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def _score(self, context: Context, hidden: Tensor) -> Tensor:
        return self.leave(hidden)


@final
class TokensAsWords(TokenNetwork):
    """The network of ``TextTokens``: it owns the start token alone, everything else is the backbone's."""

    def __init__(self, config: TextTokens, ports: TokenPorts) -> None:
        super().__init__(ports, ports.width)

    def _expert(self, context: Context) -> Expert:
        return context.segment.expert

    def column(self, context: Context, ids: Tensor) -> Tensor:
        return context.language.vocabulary - 1 - ids

    def choices(self, scores: Tensor) -> Tensor:
        return scores[..., -self.vocabulary :].flip(-1)

    def _embed(self, context: Context, ids: Tensor) -> Tensor:
        return context.language.tokens(self.column(context, ids))

    def _score(self, context: Context, hidden: Tensor) -> Tensor:
        return context.language.scores(hidden) * hidden.shape[-1] ** -0.5
