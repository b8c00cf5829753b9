"""Several datasets of one robot in stated proportions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vola.data.windows import Windows, place_in_epochs
from vola.errors import ConfigError
from vola.types import Batch, Chunk, Observation

CYCLE = 1000  # samples after which every part has been drawn exactly in proportion


class Mixture:
    """Windows of several datasets; ``weights`` are shares of the samples drawn, whatever the parts' sizes.

    Of every 1000 samples each part provides its share exactly (rounded to 1/1000, at least 1 for a positive weight),
    in an order that is a function of (seed, cycle); inside a part every sample comes once before any comes again.
    So the realised share is the intended one at any length, and a run resumes at any step.

    Raises:
        ConfigError: parts of different spec, T or H; weights that are not one per part, negative or all zero.
    """

    def __init__(self, parts: Sequence[Windows], weights: Sequence[float]) -> None:
        self.parts = tuple(parts)
        shares = np.asarray(weights, np.float64)
        if not self.parts or shares.shape != (len(self.parts),):
            raise ConfigError(
                f"Mixture: expected one weight per part, got {len(self.parts)} parts, {len(shares)} weights"
            )
        if not np.isfinite(shares).all() or (shares < 0).any() or shares.sum() <= 0:
            raise ConfigError(f"weights: expected finite numbers >= 0, one of them positive, got {list(weights)}")
        first = self.parts[0]
        for place, part in enumerate(self.parts):
            if (part.spec, part.T, part.H) != (first.spec, first.T, first.H):
                raise ConfigError(
                    f"Mixture: expected every part to have the spec, T and H of part 0 ({first.spec}, T={first.T}, "
                    f"H={first.H}), part {place} has {part.spec}, T={part.T}, H={part.H}. "
                    "Equal image sizes come from `resize`; names and units must agree."
                )
        self.intended = shares / shares.sum()
        self._counts = _shares(self.intended)

    def __len__(self) -> int:
        return sum(len(p) for p in self.parts)

    @property
    def realised(self) -> np.ndarray:
        """The share of each part in the stream, after rounding to whole samples per cycle."""
        return self._counts / CYCLE

    @property
    def epochs(self) -> np.ndarray:
        """How often each part's samples are seen while ``len(self)`` samples are drawn."""
        return self.realised * len(self) / np.array([len(p) for p in self.parts])

    def draw(self, batch_size: int, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Batch number ``step``: (part, sample number inside the part), both int64 (batch_size).

        Raises:
            ConfigError: a batch size below 1, or a negative seed or step.
        """
        if batch_size < 1 or seed < 0 or step < 0:
            raise ConfigError(f"draw: expected batch_size >= 1, seed >= 0, step >= 0, got {batch_size}, {seed}, {step}")
        position = step * batch_size + np.arange(batch_size, dtype=np.int64)
        cycle, place = np.divmod(position, CYCLE)
        part, within = np.empty(batch_size, np.int64), np.empty(batch_size, np.int64)
        for c in np.unique(cycle):
            here = cycle == c
            order = np.random.default_rng([seed, int(c)]).permutation(
                np.repeat(np.arange(len(self.parts)), self._counts)
            )
            drawn = np.stack([np.cumsum(order == k) for k in range(len(self.parts))])
            part[here] = order[place[here]]
            within[here] = c * self._counts[part[here]] + drawn[part[here], place[here]] - 1
        index = np.empty(batch_size, np.int64)
        for k, windows in enumerate(self.parts):
            index[part == k] = place_in_epochs(len(windows), seed, within[part == k])
        return part, index

    def batch(self, part: np.ndarray, index: np.ndarray) -> Batch:
        """The samples drawn, in order. ``episode`` numbers are those inside each part."""
        batches = {int(k): self.parts[k].batch(index[part == k]) for k in np.unique(part)}
        joined = np.concatenate([np.flatnonzero(part == k) for k in batches])
        order = np.argsort(joined)

        def join(arrays: list[np.ndarray]) -> np.ndarray:
            return np.concatenate(arrays)[order]

        seen = [b.observation for b in batches.values()]
        cameras = [c.name for c in self.parts[0].spec.cameras]
        texts = [text for o in seen for text in o.instruction]
        observation = Observation(
            images={c: join([o.images[c] for o in seen]) for c in cameras},
            images_valid={c: join([o.images_valid[c] for o in seen]) for c in cameras},
            state=join([o.state for o in seen]),
            state_valid=join([o.state_valid for o in seen]),
            instruction=tuple(texts[i] for i in order),
        )
        chunks = [b.chunk for b in batches.values()]
        chunk = Chunk(join([c.actions for c in chunks]), join([c.valid for c in chunks]))
        numbers = [join([getattr(b, f) for b in batches.values()]) for f in ("episode", "frame")]
        return Batch(observation, chunk, numbers[0], numbers[1])


def _shares(intended: np.ndarray) -> np.ndarray:
    """Whole samples per cycle by largest remainder; a positive weight gets at least one."""
    quota = intended * CYCLE
    counts = np.where(intended > 0, np.maximum(1, np.floor(quota)), 0).astype(np.int64)
    while counts.sum() != CYCLE:
        step = 1 if counts.sum() < CYCLE else -1
        # Only parts with more than one sample may give one back.
        movable = (intended > 0) & ((step > 0) | (counts > 1))
        counts[int(np.argmax(np.where(movable, step * (quota - counts), -np.inf)))] += step
    return counts
