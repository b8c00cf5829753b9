"""What an action tokenizer is: normalised action chunks -> integer tokens -> chunks. Settings fit it, it is saved.

Everything here is numpy and in normalised units. A sequence that stands for no chunk is flagged, never replaced by
some action in silence: rows without a decision hold NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float32, Int64

from vola.errors import InputError, expect_shape


@dataclass(frozen=True)
class Tokens:
    """ids int64 ``B L`` and which of them count (bool ``B L``); what does not count has id 0."""

    ids: Int64[np.ndarray, "B L"]
    valid: Bool[np.ndarray, "B L"]


@dataclass(frozen=True)
class Decoded:
    """Chunks float32 ``B H A``, ``malformed`` bool ``B``, and per row the reason, "" where the row is well formed.

    A malformed row is either repaired (finite numbers, still flagged) or holds NaN: it carries no decision, and an
    executor must repeat its last action.
    """

    chunks: Float32[np.ndarray, "B H A"]
    malformed: Bool[np.ndarray, " B"]
    reasons: tuple[str, ...]

    @property
    def decided(self) -> Bool[np.ndarray, " B"]:
        """Rows that may be executed: well formed or repaired."""
        return np.isfinite(self.chunks).all(axis=(1, 2))


@runtime_checkable
class ActionTokenizer(Protocol):
    """A fitted tokenizer: a value without hidden state, stored in the checkpoint as JSON."""

    @property
    def vocabulary(self) -> int:
        """Number of ids: 0..vocabulary-1, the end token included where there is one."""
        ...

    @property
    def end(self) -> int | None:
        """The id that closes every sequence, or None where the length is fixed."""
        ...

    def longest(self, H: int, A: int) -> int:
        """L: how many tokens a generated chunk may have, the end token included."""
        ...

    def encode(self, chunks: np.ndarray, valid: np.ndarray | None = None) -> Tokens:
        """Tokens of chunks ``B H A``; ``valid`` (B H) is False for steps past the end of an episode."""
        ...

    def decode(self, tokens: Tokens, H: int, A: int) -> Decoded:
        """Chunks of H steps and A dimensions."""
        ...

    def count_clipped(self, chunks: np.ndarray, valid: np.ndarray | None = None) -> tuple[np.ndarray, int]:
        """How many numbers (bins) or coefficients (FAST) lie outside what can be written: (count ``A``, of how many
        per dimension)."""
        ...

    def floor(self) -> tuple[np.ndarray, np.ndarray]:
        """Smallest reachable error in normalised units: (rms ``A``, worst ``A``), clipping apart."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Plain values; the round trip is exact."""
        ...


def checked_chunks(chunks: np.ndarray, valid: np.ndarray | None, A: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Chunks as float64 ``B H A`` with every invalid step replaced, and the mask ``B H``.

    An invalid step repeats the last valid action before it (or the first valid one, at the start of a chunk), so
    whatever stood there has no influence. A row without any valid step becomes zeros; its mask says so.

    Raises:
        InputError: wrong shapes, a mask that is not bool, or a valid number that is not finite.
    """
    sizes = {} if A is None else {"A": A}
    found = expect_shape("chunks", np.asarray(chunks), "B H A", **sizes)
    B, H = found["B"], found["H"]
    if min(B, H, found["A"]) < 1:
        raise InputError(f"chunks: expected at least one chunk, step and dimension, got {np.shape(chunks)}")
    mask = np.ones((B, H), bool) if valid is None else np.asarray(valid)
    expect_shape("valid", mask, "B H", B=B, H=H)
    if mask.dtype != bool:
        raise InputError(f"valid: expected bool, got {mask.dtype}")
    values = np.asarray(chunks, np.float64)
    bad = ~np.isfinite(values) & mask[..., None]
    if bad.any():
        b, h, a = (int(i[0]) for i in np.nonzero(bad))
        raise InputError(
            f"chunks: expected finite numbers, got {values[b, h, a]} in chunk {b}, step {h}, dimension {a}. "
            "Repair the recording or mark the step invalid."
        )
    last = np.maximum.accumulate(np.where(mask, np.arange(H), -1), axis=1)
    source = np.where(last >= 0, last, mask.argmax(axis=1)[:, None])
    held = np.take_along_axis(values, source[..., None], axis=1)
    held[~mask.any(axis=1)] = 0.0
    return held, mask


def checked_tokens(tokens: Tokens, H: int, A: int) -> list[np.ndarray]:
    """Per row the ids that count, in order.

    Raises:
        InputError: ids that are not whole numbers, shapes that differ, H or A below 1.
    """
    if H < 1 or A < 1:
        raise InputError(f"decode: expected H >= 1 and A >= 1, got H={H}, A={A}")
    found = expect_shape("tokens.ids", tokens.ids, "B L")
    expect_shape("tokens.valid", tokens.valid, "B L", **found)
    if not np.issubdtype(tokens.ids.dtype, np.integer) or tokens.valid.dtype != bool:
        raise InputError(f"tokens: expected whole ids and a bool mask, got {tokens.ids.dtype}, {tokens.valid.dtype}")
    return [ids[valid] for ids, valid in zip(tokens.ids, tokens.valid, strict=True)]


def packed(rows: Sequence[Sequence[int]]) -> Tokens:
    """Sequences of different length as ``Tokens``, padded on the right."""
    L = max(len(row) for row in rows)
    ids = np.zeros((len(rows), L), np.int64)
    for b, row in enumerate(rows):
        ids[b, : len(row)] = row
    return Tokens(ids, np.arange(L) < np.array([[len(row)] for row in rows]))
