"""L2 and L1 regression: one pass, one answer. The unimodal baseline, and OpenVLA-OFT's parallel decoding.

The minimiser of L2 is the conditional mean and of L1 the median: where demonstrations go left or right round a wall,
both go through the wall.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vola.cite import Source
from vola.heads.base import Cost, Drawn, Head, Loss, Part
from vola.model.backbone import Context


@dataclass(frozen=True)
class Regression:
    """``norm`` "l2": squared error; "l1": absolute error. The network is fed zeros (OFT's placeholder actions)."""

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Kim et al. 2025, Fine-tuning vision-language-action models: optimizing speed and success (OpenVLA-OFT)",
            "section 4.2",
            "the readout is pi0's action expert over zero tokens",
            "https://arxiv.org/abs/2502.19645",
        ),
    )
    norm: Literal["l2", "l1"] = "l2"


@final
class RegressionHead(Head):
    """The rule of ``Regression`` over a network without time."""

    def __init__(self, config: Regression, network: nn.Module, H: int, A: int) -> None:
        super().__init__()
        self.config, self.network, self.H, self.A = config, network, H, A

    def _predict(self, context: Context) -> Tensor:
        tokens = context.segment.tokens
        return self.network(context, tokens.new_zeros(context.size, self.H, self.A), None)

    def loss(
        self, context: Context, actions: Float[Tensor, "B H A"], valid: Bool[Tensor, "B H"], rng: torch.Generator
    ) -> Loss:
        error = self._predict(context).float() - actions
        values = error.square() if self.config.norm == "l2" else error.abs()
        return Loss({self.config.norm: Part(values, valid[..., None])})

    def sample(self, context: Context, rngs: Sequence[np.random.Generator]) -> Drawn:
        return Drawn(self._predict(context).float())

    def cost(self) -> Cost:
        return Cost(serial=1)
