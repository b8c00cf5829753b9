"""One integer per action number: uniform bins in the three published conventions, equal-mass bins, state bins.

Order: step by step, inside a step dimension by dimension. Also the ids' way into a text vocabulary: integers are
moved, strings are for display only, so no id can change by being split or joined as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np
from jaxtyping import Float, Int64

from vola.cite import Source
from vola.errors import CheckpointError, ConfigError, InputError, expect_shape
from vola.theory.quantisation import Convention, bin_distortion, bin_width, bin_worst
from vola.tokenizers.actions import Decoded, Tokens, checked_chunks, checked_tokens


@final
@dataclass(frozen=True)
class UniformBins:
    """K ids on [-1, 1] for every dimension. Values outside are clipped; ``count_clipped`` counts them.

    midpoint: K equal bins, decoded to their centres. truncated (RT-1): clip, scale to [0, K-1], truncate, decode to
    -1 + 2 id/(K-1), which is low by half a bin on average. edges (OpenVLA): K equally spaced edges, K - 1 centres;
    id K-1 stands for +1 alone and decodes like id K-2.

    Raises:
        ConfigError: K below 2 or an unknown convention.
    """

    K: int = 256
    convention: Convention = "midpoint"
    sources: ClassVar[tuple[Source, ...]] = (
        Source("Brohan et al., RT-1, 2022", "section 5.1", "released code: truncation, decode id/(K-1)"),
        Source("Kim et al., OpenVLA, 2024", "section 3.2", "released code: K edges, K-1 centres"),
    )

    def __post_init__(self) -> None:
        bin_width(self.K, 2.0, self.convention)

    def fit(self, chunks: np.ndarray, valid: np.ndarray | None = None) -> BinTokenizer:
        """The tokenizer for the A dimensions of ``chunks`` (N H A); nothing is learnt from their values.

        Raises:
            InputError: as ``checked_chunks``.
        """
        A = checked_chunks(chunks, valid)[0].shape[2]
        K = self.K
        centred = np.linspace(-1, 1, K + 1)
        ends = np.linspace(-1, 1, K)
        middles = (ends[:-1] + ends[1:]) / 2
        edges, centres = {
            "midpoint": (centred[1:-1], (centred[:-1] + centred[1:]) / 2),
            "truncated": (ends[1:], ends),
            "edges": (ends[1:], np.append(middles, middles[-1])),
        }[self.convention]
        rms = float(np.sqrt(bin_distortion(K, 2.0, self.convention)))
        worst = bin_worst(K, 2.0, self.convention)
        return BinTokenizer(
            np.tile(edges, (A, 1)),
            np.tile(centres, (A, 1)),
            np.tile([-1.0, 1.0], (A, 1)),
            np.tile([rms, worst], (A, 1)),
        )


@final
@dataclass(frozen=True)
class QuantileBins:
    """At most K bins per dimension that hold equally many training values; decoded to the mean of their values.

    Edges are data values, so no bin is empty. A dimension with fewer than K distinct values gets fewer bins (a
    constant one a single bin); its spare ids decode like its last bin.

    Raises:
        ConfigError: K below 2.
    """

    K: int = 256
    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Max, Quantizing for minimum distortion, 1960", "eq. 4", "centroids as there; edges at equal mass instead"
        ),
    )

    def __post_init__(self) -> None:
        bin_width(self.K)

    def fit(self, chunks: np.ndarray, valid: np.ndarray | None = None) -> BinTokenizer:
        """Bins from the valid steps of training chunks ``N H A``.

        Raises:
            InputError: as ``checked_chunks``, or no valid step at all.
        """
        held, mask = checked_chunks(chunks, valid)
        rows = held[mask]
        if not len(rows):
            raise InputError("fit: expected at least one valid step, got none")
        K, A = self.K, rows.shape[1]
        edges, centres = np.full((A, K - 1), np.inf), np.empty((A, K))
        limits, errors = np.empty((A, 2)), np.empty((A, 2))
        for a in range(A):
            values = np.sort(rows[:, a])
            cuts = np.unique(np.quantile(values, np.arange(1, K) / K, method="higher"))
            cuts = cuts[cuts > values[0]]
            ids = np.searchsorted(cuts, values, side="right")
            means = np.bincount(ids, values) / np.bincount(ids)
            edges[a, : len(cuts)] = cuts
            centres[a] = means[np.minimum(np.arange(K), len(cuts))]
            off = np.abs(values - means[ids])
            limits[a], errors[a] = (values[0], values[-1]), (np.sqrt((off**2).mean()), off.max())
        return BinTokenizer(edges, centres, limits, errors)


@final
@dataclass(frozen=True, eq=False)
class BinTokenizer:
    """Per dimension inner edges (A, K-1), ascending, +inf where a bin is never reached, and decoded values (A, K).

    Bin i holds edges[i-1] <= x < edges[i]. ``limits`` (A, 2) is the range outside which a value counts as clipped;
    ``errors`` (A, 2) the rms and worst error inside it: from theory for uniform bins (density uniform inside a bin),
    measured on the training values for equal-mass bins.
    """

    edges: Float[np.ndarray, "A I"]
    centres: Float[np.ndarray, "A K"]
    limits: Float[np.ndarray, "A 2"]
    errors: Float[np.ndarray, "A 2"]

    @property
    def vocabulary(self) -> int:
        """K."""
        return int(self.centres.shape[1])

    @property
    def end(self) -> None:
        """No end token: a chunk is always H * A tokens."""
        return

    def longest(self, H: int, A: int) -> int:
        """Exactly H * A."""
        return H * A

    def encode(self, chunks: np.ndarray, valid: np.ndarray | None = None) -> Tokens:
        """One token per number of chunks ``B H A``; the tokens of an invalid step do not count and have id 0.

        Raises:
            InputError: wrong shapes, or a valid number that is not finite.
        """
        held, mask = checked_chunks(chunks, valid, len(self.edges))
        B, H, A = held.shape
        ids = np.empty((B, H, A), np.int64)
        for a in range(A):
            ids[..., a] = np.searchsorted(self.edges[a], held[..., a], side="right")
        ids[~mask] = 0
        return Tokens(ids.reshape(B, H * A), np.repeat(mask, A, axis=1))

    def decode(self, tokens: Tokens, H: int, A: int) -> Decoded:
        """Chunks of H steps. A row with another number of tokens, or an id outside 0..K-1, is malformed: all NaN.

        Raises:
            InputError: A is not the fitted one, or no such arrays.
        """
        if len(self.edges) != A:
            raise InputError(f"decode: expected A={len(self.edges)}, the number of fitted dimensions, got A={A}")
        rows = checked_tokens(tokens, H, A)
        chunks, reasons = np.full((len(rows), H, A), np.nan, np.float32), []
        for b, row in enumerate(rows):
            foreign = row[(row < 0) | (row >= self.vocabulary)]
            if len(row) != H * A:
                reasons.append(f"length: expected {H * A} tokens, got {len(row)}")
            elif len(foreign):
                reasons.append(f"unknown id {foreign[0]}: expected 0..{self.vocabulary - 1}")
            else:
                reasons.append("")
                chunks[b] = self.centres[np.arange(A), row.reshape(H, A)]
        return Decoded(chunks, np.array([r != "" for r in reasons]), tuple(reasons))

    def count_clipped(self, chunks: np.ndarray, valid: np.ndarray | None = None) -> tuple[np.ndarray, int]:
        """How many valid numbers lie outside ``limits``: (count int64 ``A``, valid steps)."""
        held, mask = checked_chunks(chunks, valid, len(self.edges))
        rows = held[mask]
        outside = (rows < self.limits[:, 0]) | (rows > self.limits[:, 1])
        return outside.sum(0), len(rows)

    def floor(self) -> tuple[np.ndarray, np.ndarray]:
        """(rms ``A``, worst ``A``) inside the limits, normalised units; what clipping adds is not in it."""
        return self.errors[:, 0].copy(), self.errors[:, 1].copy()

    def to_json(self) -> dict[str, Any]:
        """Plain lists; edges without the infinite ones, so that the text is standard JSON."""
        edges = [row[np.isfinite(row)].tolist() for row in self.edges]
        rest = {f: getattr(self, f).tolist() for f in ("centres", "limits", "errors")}
        return {"kind": "bins", "edges": edges, **rest}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> BinTokenizer:
        """The exact inverse of ``to_json``; raises CheckpointError for anything else."""
        wanted = ("edges", "centres", "limits", "errors")
        missing = [k for k in wanted if k not in data]
        if data.get("kind") != "bins" or missing:
            raise CheckpointError(
                f"action tokenizer: expected kind 'bins' with {wanted}, got kind {data.get('kind')!r} without "
                f"{missing}. Restore the file; nothing stands in for it."
            )
        centres, limits, errors = (np.array(data[k], np.float64) for k in wanted[1:])
        if centres.ndim != 2 or limits.shape != (len(centres), 2) or errors.shape != limits.shape:
            raise CheckpointError("action tokenizer: bins of different dimensions. Restore the file.")
        A, K = centres.shape
        edges = np.full((A, K - 1), np.inf)
        for a, row in enumerate(data["edges"]):
            if a >= A or len(row) >= K or np.any(np.diff(row) <= 0):
                raise CheckpointError(f"action tokenizer: edges of dimension {a} do not ascend or do not fit {K} bins")
            edges[a, : len(row)] = row
        return BinTokenizer(edges, centres, limits, errors)


def to_text_ids(ids: np.ndarray, text_vocabulary: int) -> np.ndarray:
    """Bin ids (any shape) -> the LAST ids of a text vocabulary, text id = text_vocabulary - 1 - bin (OpenVLA, RT-2).

    text_vocabulary counts the words of the text model, without padding rows of its embedding (Llama-2: 32000, not
    32064). Raises InputError for a bin the vocabulary has no room for.
    """
    found = np.asarray(ids)
    if not np.issubdtype(found.dtype, np.integer) or (found < 0).any() or (found >= text_vocabulary).any():
        raise InputError(f"to_text_ids: expected whole ids in 0..{text_vocabulary - 1}, got {found!r:.80}")
    return text_vocabulary - 1 - found.astype(np.int64)


def from_text_ids(text_ids: np.ndarray, text_vocabulary: int, K: int) -> tuple[np.ndarray, np.ndarray]:
    """Text ids (any shape) -> (bin ids int64, foreign bool): foreign marks ids that are no action; their bin id is
    -1, which ``decode`` flags. (The published decoder clips them to an extreme action.)"""
    bins = text_vocabulary - 1 - np.asarray(text_ids, np.int64)
    foreign = (bins < 0) | (bins >= K)
    return np.where(foreign, -1, bins), foreign


def integers_text(ids: Sequence[int] | np.ndarray) -> str:
    """RT-2's spelling of one action, e.g. "1 128 91 241 5 101 127"."""
    return " ".join(str(int(i)) for i in ids)


def integers_from_text(text: str, K: int, count: int) -> np.ndarray:
    """The inverse of ``integers_text`` for ``count`` numbers in 0..K-1.

    Raises:
        InputError: another count, or a word that is no such number.
    """
    words = text.split()
    good = len(words) == count and all(w.isascii() and w.isdigit() and int(w) < K for w in words)
    if not good:
        raise InputError(f"expected {count} whole numbers in 0..{K - 1} separated by spaces, got {text!r:.80}")
    return np.array([int(w) for w in words], np.int64)


@dataclass(frozen=True)
class StateBins:
    """ids int64 ``B S`` in 0..K-1, and how many of the B values of each named dimension lay outside [-1, 1]."""

    ids: Int64[np.ndarray, "B S"]
    outside: Mapping[str, int]


def state_bins(state: Float[np.ndarray, "B S"], names: Sequence[str], K: int = 256) -> StateBins:
    """Normalised state -> K bins of width 2/K on [-1, 1], for prompts that spell the state as integers (pi0.5).

    -1 -> 0, 0 -> K/2, 1 -> K-1. Values outside are clipped to the first or last bin and counted by name; the
    published code gives -1 for everything below -1. Source: pi0.5 (Physical Intelligence 2025), released code.

    Raises:
        InputError: not ``B S`` with one name per dimension, or a number that is not finite (named).
        ConfigError: K below 2.
    """
    bin_width(K)
    values = np.asarray(state, np.float64)
    expect_shape("state", values, "B S", S=len(names))
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        b, s = (int(i) for i in bad[0])
        raise InputError(f"state: expected finite numbers, got {values[b, s]} in sample {b}, dimension {names[s]}")
    inner = np.linspace(-1, 1, K + 1)[1:-1]
    outside = ((values < -1) | (values > 1)).sum(0)
    counts = {name: int(n) for name, n in zip(names, outside, strict=True)}
    if len(counts) != len(names):
        raise ConfigError(f"names: expected different names, got {tuple(names)}")
    return StateBins(np.searchsorted(inner, values, side="right").astype(np.int64), counts)
