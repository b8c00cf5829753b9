"""Who may look at whom: a ``Layout`` is an ordered tuple of blocks of tokens and the permissions between them.

A mask in this library is a value, not code. One predicate (``_allowed``) says whether query token q may look at key
token k; the dense matrix, FlexAttention's block mask, the printed picture, the proofs (``reaches``, ``cacheable``)
and the sentences (``explain``) are all computed from it, so none of them can disagree with what attention does.

The predicate: every token has a **time** inside its block (0 in blocks without time, the position in a causal block,
the step in a time-causal one). Every ordered pair of blocks has a **window** of ages; q sees k iff the age
``time(q) - time(k)`` lies in the window of their blocks. Always, never, causal, itself only, "not after" and
"before" are six windows. A cumulative-sum mask cannot express readouts nobody reads or two mutually blind blocks.

Padding is not part of a layout: it is the per-batch ``valid`` handed to ``vola.model.attention.attention``.
"""

from __future__ import annotations

import builtins
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from vola.errors import ConfigError, InputError
from vola.model import mask_text


@dataclass(frozen=True)
class Full:
    """Every token of the block sees the whole block."""


@dataclass(frozen=True)
class Causal:
    """A token sees itself and the earlier tokens of its block."""


@dataclass(frozen=True)
class Self:
    """A token sees only itself."""


@dataclass(frozen=True)
class Blind:
    """A token sees nothing of its own block, not even itself (action slots of RT-1)."""


@dataclass(frozen=True)
class TimeCausal:
    """The block is ``steps`` equal groups of consecutive tokens; a token sees its own group and the earlier ones."""

    steps: int


Inner: TypeAlias = Full | Causal | Self | Blind | TimeCausal
When: TypeAlias = Literal["always", "not_after", "before"]
Names: TypeAlias = tuple[str, ...] | None  # blocks in layout order; None means all
Device: TypeAlias = torch.device | str
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_INNERS: dict[str, Any] = {"full": Full, "causal": Causal, "self": Self, "blind": Blind, "time_causal": TimeCausal}
_CPU = torch.device("cpu")
_FOREVER = 2**31 - 1
_NEVER = (_FOREVER, -_FOREVER)  # an empty window
# Window of ages time(q) - time(k), both ends included.
_WINDOWS: dict[str | type[Inner], tuple[int, int]] = {
    "always": (-_FOREVER, _FOREVER),
    "not_after": (0, _FOREVER),
    "before": (1, _FOREVER),
    Full: (-_FOREVER, _FOREVER),
    Causal: (0, _FOREVER),
    TimeCausal: (0, _FOREVER),
    Self: (0, 0),
    Blind: _NEVER,
}


@dataclass(frozen=True)
class Block:
    """``length`` consecutive tokens under one name, and who sees whom inside.

    Raises:
        ConfigError: empty name, length < 1, unknown ``inner``, or a length that ``TimeCausal.steps`` does not divide.
    """

    name: str
    length: int
    inner: Inner = Full()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ConfigError(f"block: expected a non-empty name, got {self.name!r}")
        if not _positive(self.length):
            raise ConfigError(
                f"block {self.name!r}: expected a length >= 1, got {self.length!r}. Leave out empty blocks."
            )
        if not isinstance(self.inner, Inner):
            kinds = "Full(), Causal(), Self(), Blind() or TimeCausal(steps)"
            raise ConfigError(f"block {self.name!r}: expected inner to be {kinds}, got {self.inner!r}")
        if isinstance(self.inner, TimeCausal) and (not _positive(self.inner.steps) or self.length % self.inner.steps):
            raise ConfigError(
                f"block {self.name!r}: expected a length divisible by its number of steps, got length {self.length} "
                f"and TimeCausal({self.inner.steps!r}). Every time step holds the same number of tokens; pad them."
            )

    @property
    def times(self) -> int:
        """How many distinct times the tokens of this block have."""
        if isinstance(self.inner, TimeCausal):
            return self.inner.steps
        return self.length if isinstance(self.inner, Causal | Self) else 1


@dataclass(frozen=True)
class Rule:
    """Tokens of block ``reader`` may look at tokens of another block ``target``.

    ``when``: "always"; or, between two ``TimeCausal`` blocks of as many steps, "not_after" (the target's step is the
    reader's or an earlier one) or "before" (strictly earlier).
    """

    reader: str
    target: str
    when: When = "always"

    def __post_init__(self) -> None:
        if self.when not in get_args(When):
            pair = f"rule {self.reader!r} -> {self.target!r}"
            raise ConfigError(f"{pair}: expected when to be one of {list(get_args(When))}, got {self.when!r}")


@dataclass(frozen=True)
class Layout:
    """Blocks in sequence order and the permissions between them; N is the number of all tokens.

    What is not permitted by a block's ``inner`` or by a rule is forbidden. Frozen and hashable; two layouts whose
    rules differ only in order are equal. Tensors returned by its methods are shared caches: do not write to them.

    Raises:
        ConfigError: no blocks, a duplicate name or rule, a rule about an unknown block or about a block and itself,
            or a time rule between blocks that do not have the same number of time steps.
    """

    blocks: tuple[Block, ...]
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        blocks, rules = tuple(self.blocks), tuple(self.rules)
        if not blocks:
            raise ConfigError("layout: expected at least one block, got none")
        object.__setattr__(self, "blocks", blocks)
        if twice := [name for i, name in enumerate(self.names) if name in self.names[:i]]:
            raise ConfigError(f"layout: expected distinct block names, got {twice[0]!r} twice")
        pairs = [(self.index(r.reader), self.index(r.target)) for r in rules]
        for i, rule in enumerate(rules):
            self._check(rule)
            if pairs[i] in pairs[:i]:
                raise ConfigError(f"layout: expected one rule per pair, got {rule.reader!r} -> {rule.target!r} twice")
        rules = tuple(rule for _, rule in sorted(zip(pairs, rules, strict=True), key=lambda x: x[0]))
        object.__setattr__(self, "rules", rules)
        # Masks are looked up once per attention call; hashing two tuples each time would cost as much as the lookup.
        object.__setattr__(self, "_hash", hash((blocks, rules)))

    def _check(self, rule: Rule) -> None:
        reader, target = self.block(rule.reader), self.block(rule.target)
        if reader is target:
            raise ConfigError(
                f"layout: expected a rule between two different blocks, got {rule.reader!r} -> itself. "
                "Who sees whom inside a block is said by its inner."
            )
        if rule.when != "always":
            steps = [b.inner.steps if isinstance(b.inner, TimeCausal) else None for b in (reader, target)]
            if steps[0] is None or steps[0] != steps[1]:
                raise ConfigError(
                    f"layout: rule {rule.reader!r} -> {rule.target!r} compares times ({rule.when!r}) and needs two "
                    f"TimeCausal blocks of as many steps, got {reader.inner} and {target.inner}"
                )

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.blocks, self.rules)  # the stored hash of strings is valid in one process only

    def __str__(self) -> str:
        return self.picture()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(block.name for block in self.blocks)

    @property
    def length(self) -> int:
        """N, the number of tokens."""
        return sum(block.length for block in self.blocks)

    def index(self, name: str) -> int:
        """Place of a block in the order. Raises ConfigError for an unknown name, with the valid ones."""
        if name in self.names:
            return self.names.index(name)
        close = difflib.get_close_matches(str(name), self.names, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"layout: expected one of the blocks {list(self.names)}, got {name!r}.{hint}")

    def block(self, name: str) -> Block:
        return self.blocks[self.index(name)]

    def slice(self, name: str) -> builtins.slice:
        """Where the tokens of a block lie in the sequence."""
        i = self.index(name)
        start = sum(block.length for block in self.blocks[:i])
        return slice(start, start + self.blocks[i].length)

    def select(self, names: Names) -> tuple[str, ...]:
        """The chosen blocks (None: all). Raises ConfigError unless they are distinct and in layout order."""
        if names is None:
            return self.names
        if isinstance(names, str):
            raise ConfigError(f"layout: expected a tuple of block names, got the string {names!r}; write ({names!r},)")
        places = [self.index(name) for name in names]
        if any(a >= b for a, b in zip(places, places[1:], strict=False)):
            raise ConfigError(f"layout: expected distinct blocks in the order {list(self.names)}, got {list(names)}")
        return tuple(names)

    def allows(self, q: Tensor | int, k: Tensor | int) -> Tensor | bool:
        """May query token q look at key token k? Integers give a bool; integer tensors broadcast."""
        device = next((x.device for x in (q, k) if isinstance(x, Tensor)), _CPU)
        for index in (q, k):
            if isinstance(index, int) and not 0 <= index < self.length:
                raise InputError(f"layout: expected a token index in 0..{self.length - 1}, got {index}")
        seen = _allowed(_tables(self, None, None, device), q, k)
        return bool(seen) if isinstance(q, int) and isinstance(k, int) else seen

    def dense(self, rows: Names = None, columns: Names = None, device: Device = "cpu") -> Bool[Tensor, "N M"]:
        """The mask as a matrix, True where the row may look at the column; rows and columns choose blocks."""
        return _dense(self, rows, columns, torch.device(device))

    def mask_mod(self, rows: Names = None, columns: Names = None, device: Device = "cpu") -> MaskMod:
        """The predicate in FlexAttention's form ``mask_mod(b, h, q, k)``, q and k counted inside the chosen blocks."""
        tables = _tables(self, rows, columns, torch.device(device))
        return lambda b, h, q, k: _allowed(tables, q, k)

    def flex(
        self, rows: Names = None, columns: Names = None, device: Device = "cpu", block_size: int = 128
    ) -> BlockMask:
        """FlexAttention's sparse block mask, the same for every sample and head."""
        return _flex(self, rows, columns, torch.device(device), block_size)

    def all_allowed(self, rows: Names = None, columns: Names = None) -> bool:
        """Whether every chosen row may look at every chosen column, so that no mask is needed."""
        return _all_allowed(self, rows, columns)

    def reaches(self, a: str, b: str) -> bool:
        """Can information in block b influence block a after some number of layers?

        The transitive closure of the predicate over tokens; a block reaches itself through its residual stream.
        """
        return bool(_influenced(self, b)[self.slice(a)].any())

    def leaks(self, *names: str) -> tuple[tuple[str, str], ...]:
        """Pairs (row, column) where a row of the named blocks looks at a column outside them."""
        return _leaks(self, names)

    def cacheable(self, *names: str) -> bool:
        """Whether no row of the named blocks looks outside them: the exact condition under which their keys and
        values, computed once without the rest, equal those of the full pass."""
        return not self.leaks(*names)

    def picture(self, tokens: bool = False) -> str:
        """Rows are who looks, columns are who is looked at; one sign per pair of blocks, or per pair of tokens."""
        spans = {name: self.slice(name) for name in self.names}
        if tokens:
            return mask_text.token_picture(spans, self.dense())
        return mask_text.block_picture(spans, self.dense(), _tables(self, None, None, _CPU).time)

    def explain(self) -> str:
        """One sentence per block: what it reads, who reads it, and what reaches it only through other blocks."""
        spans, time = {name: self.slice(name) for name in self.names}, _tables(self, None, None, _CPU).time
        lines = []
        for a in self.names:
            far = [b for b in self.names if self.reaches(a, b) and a != b and not self.dense((a,), (b,)).any()]
            lines.append(mask_text.sentence(a, spans, self.dense(), time, far) + ".")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values that ``from_json`` turns back into an equal layout."""
        word = {kind: word for word, kind in _INNERS.items()}
        blocks = [
            {"name": b.name, "length": b.length, "inner": word[type(b.inner)], **vars(b.inner)} for b in self.blocks
        ]
        return {"blocks": blocks, "rules": [dict(vars(rule)) for rule in self.rules]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        """Raises ConfigError for a missing or unknown key or word."""
        try:
            if unknown := set(data) - {"blocks", "rules"}:
                raise KeyError(*unknown)
            blocks = []
            for b in data["blocks"]:
                extra = {k: v for k, v in b.items() if k not in ("name", "length", "inner")}
                blocks.append(Block(b["name"], b["length"], _INNERS[b["inner"]](**extra)))
            return cls(tuple(blocks), tuple(Rule(**r) for r in data["rules"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                "layout: expected {'blocks': [{'name', 'length', 'inner', and 'steps' for time_causal}], 'rules': "
                f"[{{'reader', 'target', 'when'}}]}} with inner among {list(_INNERS)}; got one with {error!r}"
            ) from error


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class _Tables(NamedTuple):
    """The layout as integers, for chosen rows and columns.

    A row has its time and, for every block, the window of ages it may look at there; a column its time and block.
    Each is a tensor of its own: compiled FlexAttention refuses a mask that reads two views of one storage.
    """

    time: Int64[Tensor, " N"]
    low: Int64[Tensor, "N blocks"]
    high: Int64[Tensor, "N blocks"]
    column_time: Int64[Tensor, " M"]
    column_block: Int64[Tensor, " M"]


def _allowed(tables: _Tables, q: Tensor | int, k: Tensor | int) -> Tensor:
    """The one predicate: the age of key k seen from query q lies in the window of q for the block of k."""
    age, block = tables.time[q] - tables.column_time[k], tables.column_block[k]
    return (tables.low[q, block] <= age) & (age <= tables.high[q, block])


def _tokens(layout: Layout, names: Names, device: torch.device) -> tuple[Tensor, Tensor]:
    """Block and time of every token of the named blocks."""
    chosen = [(layout.index(name), layout.block(name)) for name in layout.select(names)]
    block = [i for i, b in chosen for _ in range(b.length)]
    time = [j * b.times // b.length for _, b in chosen for j in range(b.length)]
    return torch.tensor(block, dtype=torch.long, device=device), torch.tensor(time, dtype=torch.long, device=device)


# The cached tensors below may be created first inside torch.inference_mode and used later in a training step, which
# autograd refuses; they are therefore made outside of it. The caches are bounded because texts differ in length.
@lru_cache(maxsize=256)
def _tables(layout: Layout, rows: Names, columns: Names, device: torch.device) -> _Tables:
    windows = [[_NEVER] * len(layout.blocks) for _ in layout.blocks]
    for i, b in enumerate(layout.blocks):
        windows[i][i] = _WINDOWS[type(b.inner)]
    for rule in layout.rules:
        windows[layout.index(rule.reader)][layout.index(rule.target)] = _WINDOWS[rule.when]
    with torch.inference_mode(False):
        low, high = torch.tensor(windows, device=device).unbind(-1)
        (block, time), (column_block, column_time) = (_tokens(layout, names, device) for names in (rows, columns))
        return _Tables(time, low[block], high[block], column_time, column_block)


@lru_cache(maxsize=256)
def _dense(layout: Layout, rows: Names, columns: Names, device: torch.device) -> Tensor:
    tables = _tables(layout, rows, columns, device)
    with torch.inference_mode(False):
        q, k = (torch.arange(len(t), device=device) for t in (tables.time, tables.column_time))
        return _allowed(tables, q[:, None], k)


@lru_cache(maxsize=256)
def _flex(layout: Layout, rows: Names, columns: Names, device: torch.device, block_size: int) -> BlockMask:
    N, M = layout.dense(rows, columns).shape
    with torch.inference_mode(False):
        return create_block_mask(layout.mask_mod(rows, columns, device), None, None, N, M, str(device), block_size)


@lru_cache(maxsize=2048)
def _all_allowed(layout: Layout, rows: Names, columns: Names) -> bool:
    return bool(layout.dense(rows, columns).all())


@lru_cache(maxsize=2048)
def _leaks(layout: Layout, names: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    rows = sorted(set(names), key=layout.index)
    others = [name for name in layout.names if name not in names]
    return tuple((a, b) for a in rows for b in others if bool(layout.dense((a,), (b,)).any()))


@lru_cache(maxsize=2048)
def _influenced(layout: Layout, source: str) -> Bool[Tensor, " N"]:
    """Tokens that information from a block can have reached: grow the set by one layer until it stays."""
    mask = layout.dense()
    reached = torch.zeros(layout.length, dtype=torch.bool)
    reached[layout.slice(source)] = True
    while True:
        grown = reached | (mask & reached).any(1)
        if torch.equal(grown, reached):
            return reached
        reached = grown
