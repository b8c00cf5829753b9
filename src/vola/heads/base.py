"""What a head is: a rule for scoring and drawing chunks, given a network that computes.

Everything here is in normalised units; ``Policy`` converts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vola.data.stats import Normaliser
from vola.errors import ConfigError
from vola.model.backbone import Context


@dataclass(frozen=True)
class Cost:
    """Forward passes of the network for one chunk: ``serial`` one after the other, ``parallel`` at the same time."""

    serial: int
    parallel: int = 1


@dataclass(frozen=True)
class Floor:
    """The smallest error a head can reach, however well it is trained, per action dimension in physical units:
    root mean square and largest, for actions inside the range that the head covers. Zero for continuous heads."""

    rms: Float[np.ndarray, " A"]
    worst: Float[np.ndarray, " A"]


@dataclass(frozen=True)
class Part:
    """One term of a loss: ``values`` ``B ...``, which of them count (broadcasts), and the factor of its mean."""

    values: Float[Tensor, "B ..."]
    valid: Bool[Tensor, "B ..."]
    weight: float = 1.0

    def mean(self) -> Tensor:
        """Mean over the numbers that count, unweighted: padding enters neither the sum nor the count."""
        valid = self.valid.expand_as(self.values)
        return torch.where(valid, self.values, 0).sum() / valid.sum().clamp(min=1)


@dataclass(frozen=True)
class Loss:
    """The terms of a head's loss by name. The first is the main one: shape ``B H A`` where it is per number."""

    parts: Mapping[str, Part]

    @property
    def main(self) -> Part:
        return next(iter(self.parts.values()))

    def mean(self) -> Tensor:
        """What training minimises: the weighted sum of the parts' means."""
        return torch.stack([p.weight * p.mean() for p in self.parts.values()]).sum()


@dataclass(frozen=True)
class Drawn:
    """Chunks ``B H A``. malformed: where the tokens did not decode. valid: steps that carry a decision. None: all
    well, and all valid."""

    actions: Float[Tensor, "B H A"]
    malformed: Bool[Tensor, " B"] | None = None
    valid: Bool[Tensor, "B H"] | None = None


class Head(nn.Module):
    """A rule with its network. Abstract; every concrete head is final."""

    network: nn.Module

    @abstractmethod
    def loss(
        self, context: Context, actions: Float[Tensor, "B H A"], valid: Bool[Tensor, "B H"], rng: torch.Generator
    ) -> Loss:
        """Loss of a batch; steps that are not ``valid`` change nothing.

        Seeding ``rng`` alike gives the same draws: held-out losses at different steps are comparable.
        """

    @abstractmethod
    def sample(self, context: Context, rngs: Sequence[np.random.Generator]) -> Drawn:
        """One chunk per sample, drawn with that sample's own generator."""

    @abstractmethod
    def cost(self) -> Cost:
        """Forward passes per chunk."""

    def floor(self, normaliser: Normaliser) -> Floor:
        """Smallest reachable error in the units of ``normaliser``; zero unless a head quantises."""
        return Floor(np.zeros(len(normaliser.names)), np.zeros(len(normaliser.names)))

    def log_prob(
        self, context: Context, actions: Float[Tensor, "B H A"], valid: Bool[Tensor, "B H"], rng: torch.Generator
    ) -> Float[Tensor, " B"]:
        """Log probability (nats) of each chunk.

        Raises:
            ConfigError: the rule defines none (regression, CVAE, diffusion).
        """
        raise ConfigError(
            f"{type(self).__name__}: this rule gives no likelihood; token heads and flow matching do. Compare samples."
        )


def noise_like_chunk(rngs: Sequence[np.random.Generator], H: int, A: int, device: torch.device) -> Tensor:
    """Standard normal ``B H A``, sample b from generator b alone."""
    draws = np.stack([g.standard_normal((H, A), dtype=np.float32) for g in rngs])
    return torch.from_numpy(draws).to(device)
