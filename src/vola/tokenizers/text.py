"""Instructions -> token ids, with a vocabulary fitted on the training instructions.

The work is done by the ``tokenizers`` library; this file fixes the convention: lower case without invisible
characters, split at white space and punctuation, every Chinese character a word, id 0 = padding, id 1 = unknown.
A word that training never saw is unknown; it is counted and reported by ``unknown_words``, never silently replaced
by another word.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int64
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from vola.errors import CheckpointError, InputError

PAD, UNKNOWN = 0, 1


@dataclass(frozen=True)
class TextTokenizer:
    """A word vocabulary; equal vocabularies are equal tokenizers. ``words[i]`` has id i."""

    words: tuple[str, ...]

    @staticmethod
    def fit(instructions: Iterable[str]) -> TextTokenizer:
        """Every word of the training instructions, in alphabetic order behind padding and unknown.

        Raises:
            InputError: an instruction without a word, or none at all.
        """
        splitter = _library_tokenizer({"[PAD]": PAD, "[UNK]": UNKNOWN})
        split = {text: _split(splitter, text) for text in instructions}
        empty = [text for text, words in split.items() if not words]
        if empty or not split:
            raise InputError(
                f"instructions: expected at least one word in the training set's every instruction, got {empty[:3]}. "
                "Give the dataset one with `--instruction 'what the robot does'`."
            )
        words = {word for found in split.values() for word in found}
        return TextTokenizer(("[PAD]", "[UNK]", *sorted(words)))

    @cached_property
    def _library(self) -> Tokenizer:
        return _library_tokenizer({word: i for i, word in enumerate(self.words)})

    def encode(self, instructions: Sequence[str]) -> tuple[Int64[np.ndarray, "B N"], Bool[np.ndarray, "B N"]]:
        """Ids and validity ``B N``, N the longest instruction of these; nothing is ever cut off.

        Raises:
            InputError: no instruction, a bare string, or an instruction that holds no word at all.
        """
        if isinstance(instructions, str) or not instructions:
            raise InputError(f"instructions: expected at least one sentence in a list or tuple, got {instructions!r}")
        rows = [self._library.encode(text).ids for text in instructions]
        for text, row in zip(instructions, rows, strict=True):
            if not row:
                raise InputError(f"instruction: expected at least one word, got {text!r}")
        N = max(len(row) for row in rows)
        ids = np.full((len(rows), N), PAD, dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        return ids, np.arange(N) < np.array([[len(row)] for row in rows])

    def unknown_words(self, instructions: Sequence[str]) -> tuple[str, ...]:
        """The words, in order and without repetition, that training never saw."""
        known = set(self.words)
        found = (w for text in instructions for w in _split(self._library, text) if w not in known)
        return tuple(dict.fromkeys(found))

    def to_json(self) -> str:
        return json.dumps({"kind": "words", "words": list(self.words)}, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> TextTokenizer:
        """Raises CheckpointError for anything but the output of ``to_json``."""
        try:
            data = json.loads(text)
            kind, words = data["kind"], tuple(data["words"])
        except (ValueError, KeyError, TypeError):
            kind, words = None, ()
        if kind != "words" or words[:2] != ("[PAD]", "[UNK]"):
            raise CheckpointError(
                'tokenizer: expected {"kind": "words", "words": ["[PAD]", "[UNK]", ...]}, '
                f"got {text!r:.80}. The file was not written by vola or is damaged; train again or restore it."
            )
        return TextTokenizer(words)


def _split(library: Tokenizer, text: str) -> list[str]:
    normal = library.normalizer.normalize_str(text)
    return [word for word, _ in library.pre_tokenizer.pre_tokenize_str(normal)]


def _library_tokenizer(vocabulary: dict[str, int]) -> Tokenizer:
    library = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    clean = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=False, lowercase=True)
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), clean])
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return library
