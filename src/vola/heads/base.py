"""What a head is: a rule for scoring and drawing chunks, given a network that computes.

Everything here is in normalised units; ``Policy`` converts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vola.model.backbone import Context


@dataclass(frozen=True)
class Cost:
    """Forward passes of the network for one chunk: ``serial`` one after the other, ``parallel`` at the same time."""

    serial: int
    parallel: int = 1


class Head(nn.Module):
    """A rule with its network. Abstract; every concrete head is final."""

    network: nn.Module

    @abstractmethod
    def loss(self, context: Context, actions: Float[Tensor, "B H A"], rng: torch.Generator) -> Float[Tensor, "B H A"]:
        """Loss of every number of the chunk; what is padding is left to the caller to mask.

        Seeding ``rng`` alike gives the same draws: held-out losses at different steps are comparable.
        """

    @abstractmethod
    def sample(self, context: Context, rngs: Sequence[np.random.Generator]) -> Float[Tensor, "B H A"]:
        """One chunk per sample, drawn with that sample's own generator."""

    @abstractmethod
    def cost(self) -> Cost:
        """Forward passes per chunk."""


def noise_like_chunk(rngs: Sequence[np.random.Generator], H: int, A: int, device: torch.device) -> Tensor:
    """Standard normal ``B H A``, sample b from generator b alone."""
    draws = np.stack([g.standard_normal((H, A), dtype=np.float32) for g in rngs])
    return torch.from_numpy(draws).to(device)
