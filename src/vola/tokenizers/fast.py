"""FAST: a chunk as the rounded coefficients of its cosine transform, compressed by byte-pair encoding.

Steps (Pertsch et al., FAST, 2025, section IV): orthonormal DCT-II over time, times ``scale``, round half to even,
row-major (frequency, dimension), minus the smallest coefficient, one character each, BPE by the ``tokenizers``
library, and an end token. H and A are arguments of ``decode``; nothing is remembered between calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, final, get_args

import numpy as np
from scipy.fft import dct, idct
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from vola.cite import Source
from vola.errors import CheckpointError, ConfigError, InputError, expect_positive
from vola.tokenizers.actions import Decoded, Tokens, checked_chunks, checked_tokens, packed

OnMalformed = Literal["repair", "repeat", "raise"]
Pieces = Literal["byte_level", "whole"]

# Code points from here on are surrogates, which are no characters: a BPE refuses them.
FIRST_SURROGATE = 0xD800
_SAVED = ("scale", "low", "high", "H", "A", "length", "rms", "on_malformed")
SLACK = 1.25  # a chunk never seen may need this much more tokens than the longest training chunk


@final
@dataclass(frozen=True)
class FastConfig:
    """How to fit FAST.

    scale: coefficients per normalised unit before rounding. vocabulary: BPE tokens (the end token comes on top).
    min_frequency: a pair must occur this often to be merged. reach: coefficients beyond those of a chunk that is
    constant at +-reach are saturated, so that an outlier in the data cannot fill the alphabet. margin: how much
    further than the training coefficients the alphabet extends at both ends, as a share of their range; 0, as
    published, saturates every motion larger than those of the training set.
    pieces: "byte_level" is the published pipeline, which works on UTF-8 bytes and never merges across changes between
    letters, digits and other characters; "whole" merges anywhere, one symbol per coefficient.
    on_malformed: what ``decode`` makes of a sequence that is no chunk; all three are flagged or raised.
    "repair": missing coefficients are 0, surplus ones are dropped. "repeat": NaN, the executor repeats its last
    action. "raise": InputError.

    Raises:
        ConfigError: a setting out of range.
    """

    scale: float = 10.0
    vocabulary: int = 1024
    min_frequency: int = 2
    reach: float = 4.0
    margin: float = 0.0
    pieces: Pieces = "byte_level"
    on_malformed: OnMalformed = "repeat"
    sources: ClassVar[tuple[Source, ...]] = (
        Source("Pertsch et al., FAST: Efficient Action Tokenization for Vision-Language-Action Models, 2025", "IV"),
    )

    def __post_init__(self) -> None:
        expect_positive("FastConfig", vocabulary=self.vocabulary, min_frequency=self.min_frequency)
        for name in ("scale", "reach"):
            if not (np.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"FastConfig: expected {name} > 0, got {getattr(self, name)!r}")
        if not (np.isfinite(self.margin) and self.margin >= 0):
            raise ConfigError(f"FastConfig: expected margin >= 0, got {self.margin!r}")
        if self.pieces not in get_args(Pieces):
            raise ConfigError(f"FastConfig: expected pieces in {get_args(Pieces)}, got {self.pieces!r}")
        _check_policy(self.on_malformed)

    def fit(self, chunks: np.ndarray, valid: np.ndarray | None = None) -> FastTokenizer:
        """Alphabet and merges from training chunks ``N H A``; invalid steps repeat the last valid action.

        Raises:
            InputError: as ``checked_chunks``, or no chunk with a valid step.
            ConfigError: more different coefficients than the vocabulary has tokens.
        """
        held, mask = checked_chunks(chunks, valid)
        held = held[mask.any(axis=1)]
        if not len(held):
            raise InputError("fit: expected at least one chunk with a valid step, got none")
        N, H, A = held.shape
        whole = coefficients(held, self.scale).reshape(N, H * A)
        limit = int(np.ceil(self.reach * np.sqrt(H) * self.scale))
        more = int(np.ceil(self.margin * (int(whole.max()) - int(whole.min()))))
        low, high = (int(np.clip(v, -limit, limit)) for v in (int(whole.min()) - more, int(whole.max()) + more))
        span = high - low + 1
        if span > self.vocabulary or span > FIRST_SURROGATE:
            raise ConfigError(
                f"FAST: the coefficients take {span} values ({low}..{high}), the vocabulary has {self.vocabulary} "
                f"tokens. Lower scale={self.scale:g}, margin or reach={self.reach:g}, or raise the vocabulary."
            )
        texts = ["".join(map(chr, row)) for row in (np.clip(whole, low, high) - low).tolist()]
        lost = (whole - self.scale * dct(held, axis=1, norm="ortho").reshape(N, H * A)) / self.scale
        rms = tuple(np.sqrt((lost.reshape(-1, A) ** 2).mean(0)).tolist())
        fitted = FastTokenizer(_train(texts, span, self), self.scale, low, high, H, A, 0, rms, self.on_malformed)
        longest = max(len(row) for row in fitted._rows(whole))
        return replace(fitted, length=min(int(np.ceil(SLACK * longest)) + 1, fitted._bound(H, A)))


@final
@dataclass(frozen=True)
class BytePairs:
    """A trained BPE: ``tokens[i]`` has id i; ``merges`` in the order in which they apply; see ``FastConfig.pieces``.

    Raises:
        CheckpointError: a token twice, or a merge of or into something that is no token.
    """

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    pieces: Pieces

    def __post_init__(self) -> None:
        known = set(self.tokens)
        broken = [m for m in self.merges if len(m) != 2 or not {*m, "".join(m)} <= known]
        if len(known) != len(self.tokens) or broken or self.pieces not in get_args(Pieces):
            raise CheckpointError(
                f"byte pairs: expected different tokens, merges of two tokens into a third and pieces in "
                f"{get_args(Pieces)}, got {len(self.tokens)} tokens ({len(known)} different), unusable merges "
                f"{broken[:3]} and {self.pieces!r}. Restore the file."
            )

    @staticmethod
    def published(text: str) -> BytePairs:
        """From the text of a ``tokenizer.json`` with a BPE model behind byte-level splitting, as FAST publishes.

        Raises:
            CheckpointError: not such a file, or a setting (normaliser, unknown token, dropout) that FAST does not use.
        """
        try:
            data = json.loads(text)
            model, split = data["model"], data["pre_tokenizer"]
            ordered = sorted(model["vocab"], key=model["vocab"].__getitem__)
            merges = tuple((m[0], m[1]) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"])
            plain = not any(model.get(k) for k in ("dropout", "unk_token", "byte_fallback", "end_of_word_suffix"))
            plain &= sorted(model["vocab"].values()) == list(range(len(ordered)))
            plain &= split["type"] == "ByteLevel" and not split["add_prefix_space"] and split.get("use_regex", True)
            plain &= data.get("normalizer") is None and not data.get("added_tokens")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            plain = False
        if not plain:
            raise CheckpointError(
                f"tokenizer.json: expected a plain BPE model behind a ByteLevel pre-tokenizer without prefix space or "
                f"added tokens, got {text!r:.80}. Other pipelines give other ids."
            )
        return BytePairs(tuple(ordered), merges, "byte_level")

    @cached_property
    def library(self) -> Tokenizer:
        """The same in the ``tokenizers`` library, which does the work."""
        ids = {token: i for i, token in enumerate(self.tokens)}
        return _pipeline(models.BPE(ids, list(self.merges)), self.pieces)


@final
@dataclass(frozen=True)
class FastTokenizer:
    """A trained FAST: characters 0, 1, ... of its byte pairs stand for the coefficients ``low``..``high``.

    A coefficient that has no character, or one whose character the BPE cannot write (a byte never seen in training),
    is replaced by the nearest that it can; ``count_clipped`` counts these. H and A are of the training chunks and
    only serve ``longest`` and ``floor``; ``rms`` (A) is the rounding error measured on those, () where there were none.

    Raises:
        ConfigError: an empty or too wide range of coefficients, or a BPE that can write none of them.
    """

    pairs: BytePairs
    scale: float
    low: int
    high: int
    H: int
    A: int
    length: int
    rms: tuple[float, ...] = ()
    on_malformed: OnMalformed = "repeat"

    def __post_init__(self) -> None:
        _check_policy(self.on_malformed)
        if not 0 <= self.high - self.low < FIRST_SURROGATE:
            raise ConfigError(f"FAST: expected low <= high < low + {FIRST_SURROGATE}, got {self.low}..{self.high}")
        if not self._writable.any():
            raise ConfigError(f"FAST: the BPE can write none of the coefficients {self.low}..{self.high}")

    @staticmethod
    def published(text: str, low: int, H: int, A: int, scale: float = 10.0) -> FastTokenizer:
        """A tokenizer from elsewhere: the text of its ``tokenizer.json`` and its min_token (-354 for the universal
        one, physical-intelligence/fast). ``longest`` is then the bound that no chunk exceeds."""
        pairs = BytePairs.published(text)
        return FastTokenizer(pairs, scale, low, low + len(pairs.tokens) - 1, H, A, 0)

    @cached_property
    def _writable(self) -> np.ndarray:
        """Which coefficients low..high survive the BPE."""
        texts = [chr(i) for i in range(self.high - self.low + 1)]
        bpe = self.pairs.library
        return np.array([bpe.decode(bpe.encode(text).ids) == text for text in texts])

    @cached_property
    def _nearest(self) -> np.ndarray:
        """Per coefficient low..high the character of the nearest one that can be written."""
        good = np.flatnonzero(self._writable)
        all_ = np.arange(len(self._writable))
        right = good[np.minimum(np.searchsorted(good, all_), len(good) - 1)]
        left = good[np.maximum(np.searchsorted(good, all_, side="right") - 1, 0)]
        return np.where(np.abs(all_ - left) <= np.abs(all_ - right), left, right)

    @property
    def vocabulary(self) -> int:
        """BPE tokens and the end token."""
        return len(self.pairs.tokens) + 1

    @property
    def end(self) -> int:
        """The id of the end token: the last one."""
        return self.vocabulary - 1

    def longest(self, H: int, A: int) -> int:
        """L for generation: a quarter more than the longest training chunk needed, with the end token; for another
        H or A, or a published tokenizer, the bound. ``encode`` never cuts: a chunk unlike the training set may be
        longer."""
        return self.length if self.length and (H, A) == (self.H, self.A) else self._bound(H, A)

    def _bound(self, H: int, A: int) -> int:
        bytes_each = len(chr(self.high - self.low).encode())
        return H * A * bytes_each + 1

    def encode(self, chunks: np.ndarray, valid: np.ndarray | None = None) -> Tokens:
        """Tokens of chunks ``B H A``, each row closed by the end token. Invalid steps repeat the last valid action.

        Raises:
            InputError: wrong shapes, a valid number that is not finite, or a chunk without a valid step.
        """
        held, mask = checked_chunks(chunks, valid)
        empty = np.flatnonzero(~mask.any(axis=1))
        if len(empty):
            raise InputError(f"encode: chunk {empty[0]} has no valid step. Leave it out of the batch.")
        whole = coefficients(held, self.scale).reshape(len(held), -1)
        return packed([[*row, self.end] for row in self._rows(whole)])

    def _rows(self, whole: np.ndarray) -> list[list[int]]:
        """BPE ids of coefficients ``B H*A``, without the end token."""
        characters = self._nearest[np.clip(whole, self.low, self.high) - self.low]
        return [self.pairs.library.encode("".join(map(chr, row))).ids for row in characters.tolist()]

    def count_clipped(self, chunks: np.ndarray, valid: np.ndarray | None = None) -> tuple[np.ndarray, int]:
        """How many coefficients were replaced by another: (count int64 ``A``, coefficients per dimension)."""
        held, mask = checked_chunks(chunks, valid)
        whole = coefficients(held[mask.any(axis=1)], self.scale)
        inside = np.clip(whole, self.low, self.high)
        changed = (inside != whole) | ~self._writable[inside - self.low]
        return changed.sum(axis=(0, 1)), int(np.prod(whole.shape[:2]))

    def decode(self, tokens: Tokens, H: int, A: int) -> Decoded:
        """Chunks of H steps and A dimensions; tokens must hold exactly H * A coefficients and one closing end token.

        Raises:
            InputError: a malformed row under "raise" (with its reason), or no such arrays.
        """
        whole, reasons = [], []
        for b, row in enumerate(checked_tokens(tokens, H, A)):
            found, reason = self._coefficients(row, H * A)
            if reason and self.on_malformed == "raise":
                raise InputError(f"FAST: sequence {b} of the batch is no chunk of {H} x {A}: {reason}")
            whole.append(found)
            reasons.append(reason)
        malformed = np.array([r != "" for r in reasons], bool)
        spectrum = np.array(whole, np.float64).reshape(-1, H, A)
        chunks = idct(spectrum / self.scale, axis=1, norm="ortho").astype(np.float32)
        if self.on_malformed == "repeat":
            chunks[malformed] = np.nan
        return Decoded(chunks, malformed, tuple(reasons))

    def _coefficients(self, row: np.ndarray, count: int) -> tuple[np.ndarray, str]:
        """Exactly ``count`` coefficients, repaired where needed, and what was wrong ("" if nothing)."""
        reasons = []
        ends = np.flatnonzero(row == self.end)
        if not len(ends):
            reasons.append("no end token")
        elif len(row) > ends[0] + 1:
            reasons.append(f"{len(row) - ends[0] - 1} tokens behind the end token")
        body = row[: ends[0]] if len(ends) else row
        known = (body >= 0) & (body < self.end)
        if not known.all():
            reasons.append(f"unknown id {body[~known][0]}: expected 0..{self.end}")
        text = self.pairs.library.decode(body[known].tolist())
        characters = np.array([ord(c) for c in text], np.int64)
        # A broken byte sequence decodes to U+FFFD, which as a coefficient would be an enormous motion.
        legal = characters <= self.high - self.low
        if not legal.all():
            reasons.append(f"{(~legal).sum()} characters that are no coefficient")
        if len(characters) != count:
            reasons.append(f"length: expected {count} coefficients, got {len(characters)}")
        found = np.zeros(count, np.int64)
        usable = np.where(legal, characters + self.low, 0)[:count]
        found[: len(usable)] = usable
        return found, ", ".join(reasons)

    def floor(self) -> tuple[np.ndarray, np.ndarray]:
        """(rms ``A``, worst ``A``) of rounding, normalised units, saturation apart.

        The orthonormal transform keeps the error of the coefficients. rms is measured on the training chunks; without
        them it is 1/(scale sqrt 12), which holds where coefficients spread over several integers (those that round
        to 0 lose less, so for smooth chunks it is too high). worst = half a step in every coefficient, all of the
        signs that add up at one step: max_h sum_j |C_jh| / (2 scale).
        """
        C = dct(np.eye(self.H), axis=0, norm="ortho")
        worst = np.abs(C).sum(axis=0).max() / (2 * self.scale)
        rms = np.array(self.rms) if self.rms else np.full(self.A, 1 / (self.scale * np.sqrt(12)))
        return rms, np.full(self.A, worst)

    def to_json(self) -> dict[str, Any]:
        """Plain values, the BPE's tokens and merges among them."""
        pairs = {"tokens": list(self.pairs.tokens), "merges": [list(m) for m in self.pairs.merges]}
        saved = {n: getattr(self, n) for n in _SAVED} | {"rms": list(self.rms)}
        return {"kind": "fast", "pieces": self.pairs.pieces, **pairs, **saved}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> FastTokenizer:
        """The exact inverse of ``to_json``; raises CheckpointError for anything else."""
        wanted = ("tokens", "merges", "pieces", *_SAVED)
        missing = [k for k in wanted if k not in data]
        if data.get("kind") != "fast" or missing:
            raise CheckpointError(
                f"action tokenizer: expected kind 'fast' with {wanted}, got kind {data.get('kind')!r} without "
                f"{missing}. Restore the file; nothing stands in for it."
            )
        try:
            merges = tuple((first, second) for first, second in data["merges"])
            pairs = BytePairs(tuple(data["tokens"]), merges, data["pieces"])
            return FastTokenizer(pairs, **{k: data[k] for k in _SAVED} | {"rms": tuple(data["rms"])})
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"action tokenizer: a damaged entry ({error}). Restore the file.") from None


def coefficients(chunks: np.ndarray, scale: float) -> np.ndarray:
    """Whole DCT coefficients ``B H A`` (axis 1 is frequency) of finite chunks."""
    return whole_numbers(dct(np.asarray(chunks, np.float64), axis=1, norm="ortho") * scale)


def whole_numbers(values: np.ndarray) -> np.ndarray:
    """Nearest whole number, ties to the even one; clipped where int64 ends."""
    return np.clip(np.around(values), -(2.0**62), 2.0**62).astype(np.int64)


def _pipeline(model: models.BPE, pieces: Pieces) -> Tokenizer:
    library = Tokenizer(model)
    library.decoder = decoders.Fuse()
    if pieces == "byte_level":
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
    return library


def _train(texts: list[str], span: int, config: FastConfig) -> BytePairs:
    library = _pipeline(models.BPE(), config.pieces)
    alphabet = [chr(i) for i in range(span)]
    if config.margin and config.pieces == "byte_level":
        # What training did not show must still be writable: the byte-level spelling of every character.
        spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = sorted({*alphabet, *(c for char in alphabet for c in spelling.pre_tokenize_str(char)[0][0])})
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocabulary,
        min_frequency=config.min_frequency,
        show_progress=False,
        special_tokens=[],
        initial_alphabet=alphabet,
        max_token_length=10_000,
    )
    library.train_from_iterator(texts, trainer=trainer)
    # The library shows its merges only inside the JSON that it writes.
    model = json.loads(library.to_str())["model"]
    tokens = tuple(sorted(model["vocab"], key=model["vocab"].__getitem__))
    return BytePairs(tokens, tuple((a, b) for a, b in model["merges"]), config.pieces)


def _check_policy(on_malformed: str) -> None:
    if on_malformed not in get_args(OnMalformed):
        raise ConfigError(f"on_malformed: expected one of {get_args(OnMalformed)}, got {on_malformed!r}")
