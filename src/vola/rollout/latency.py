"""How many control ticks a plan takes while the world goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vola.errors import ConfigError


@dataclass(frozen=True)
class Latency:
    """A plan asked for at tick t arrives at tick t + d. ``ticks`` is d, or the possible d with ``probabilities``.

    Control ticks, not milliseconds: d = ceil(seconds of planning and transport * control rate).
    """

    ticks: int | tuple[int, ...]
    probabilities: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        several = isinstance(self.ticks, tuple)
        values = self.ticks if isinstance(self.ticks, tuple) else (self.ticks,)
        if not values or any(not isinstance(d, int) or isinstance(d, bool) or d < 0 for d in values):
            raise ConfigError(f"latency: expected whole ticks >= 0, got {self.ticks!r}")
        if several != (self.probabilities is not None):
            raise ConfigError(
                "latency: expected one number of ticks, or several with their probabilities, got "
                f"ticks={self.ticks!r}, probabilities={self.probabilities!r}"
            )
        p = self.probabilities
        fits = p is None or (len(p) == len(values) and all(0 <= x <= 1 for x in p) and math.isclose(sum(p), 1))
        if not fits:
            raise ConfigError(f"latency: expected {len(values)} probabilities that sum to 1, got {p!r}")

    def draw(self, rng: np.random.Generator) -> int:
        """Ticks of one plan; uses ``rng`` only where there is something to draw."""
        if isinstance(self.ticks, int):
            return self.ticks
        assert self.probabilities is not None
        edges = np.cumsum(self.probabilities)
        # side="right": an entry of probability 0 is never drawn. The last edge may be rounded to below 1.
        place = int(np.searchsorted(edges / edges[-1], rng.random(), side="right"))
        return self.ticks[place]
