"""Scaled dot-product attention under a layout, in three backends that agree, and the key/value cache beside it.

    A = softmax(scale * q k^T) v,   the softmax over the keys that the layout and ``valid`` permit

``attention`` is ``attend`` after ``prepare``: preparing joins layout and padding into a mask, which all layers of one
pass can share; attending is the arithmetic. Source: Vaswani et al. (arXiv 1706.03762, eq. 1); grouped KV heads:
Ainslie et al. (arXiv 2305.13245).

A query with no permitted key has no softmax. Its output is zero, and its gradients are zero, in every backend.
Keys that are not permitted change nothing as long as their scores and values are finite; the reference backend also
ignores NaN in keys and values that are not ``valid``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from vola.errors import ConfigError, InputError, expect_shape
from vola.model.layout import Layout, Names

Backend: TypeAlias = Literal["reference", "sdpa", "flex"]


@dataclass(frozen=True, eq=False)
class Mask:
    """Who may look at whom in one pass: ``prepare`` makes it, ``attend`` uses it. b is B, or 1 without padding.

    ``allowed`` (None: everything) serves the reference, ``bias`` (0 or -inf, in the dtype of q; None: everything)
    SDPA, ``blocks`` FlexAttention. Rows with no permitted key are opened in the first two, so that the softmax and its
    gradient stay finite, and listed in ``empty`` (None: no such row) to be zeroed after it.
    """

    backend: Backend
    N: int
    M: int
    allowed: Bool[Tensor, "b 1 N M"] | None = None
    bias: Float[Tensor, "b 1 N M"] | None = None
    blocks: BlockMask | None = None
    empty: Bool[Tensor, "b 1 N 1"] | None = None
    valid: Bool[Tensor, "B M"] | None = None


def attention(
    q: Float[Tensor, "B Hq N d"],
    k: Float[Tensor, "B Hk M d"],
    v: Float[Tensor, "B Hk M d"],
    *,
    layout: Layout,
    rows: Names = None,
    columns: Names = None,
    valid: Bool[Tensor, "B M"] | None = None,
    backend: Backend = "sdpa",
    scale: float | None = None,
) -> Float[Tensor, "B Hq N d"]:
    """Queries of the blocks ``rows`` look at keys of the blocks ``columns`` as the layout permits.

    Args:
        q: queries of the N tokens of ``rows`` (blocks in layout order; None: all). Hq is a multiple of Hk; query head
            h reads key head h // (Hq / Hk).
        k, v: keys and values of the M tokens of ``columns``.
        valid: False for padded keys; None when all count.
        backend: "reference" is the formula, with scores and softmax in float32; "sdpa" torch's fused attention,
            without a mask where everything is permitted; "flex" FlexAttention, compiled on a GPU, unfused and without
            gradients on CPU.
        scale: of the scores; None is d ** -0.5.

    Raises:
        InputError: shapes that do not fit each other or the layout.
        ConfigError: an unknown backend or block, or a backend that cannot do what is asked here. Never falls back.
    """
    return attend(q, k, v, prepare(layout, rows, columns, valid, q.device, q.dtype, backend), scale)


def prepare(
    layout: Layout,
    rows: Names,
    columns: Names,
    valid: Bool[Tensor, "B M"] | None,
    device: torch.device,
    dtype: torch.dtype,
    backend: Backend = "sdpa",
) -> Mask:
    """Join layout and padding for queries of this device and dtype. Errors as in ``attention``."""
    mask = _without_padding(layout, rows, columns, device, dtype, backend)
    if valid is None:
        return mask
    if valid.dtype is not torch.bool:
        raise InputError(f"valid: expected a bool tensor, True where a key counts, got {valid.dtype}")
    B = expect_shape("valid", valid, "B M", M=mask.M)["B"]
    allowed = valid[:, None, None, :]
    if not layout.all_allowed(rows, columns):
        allowed = allowed & layout.dense(rows, columns, device)
    barred = ~allowed.any(-1, keepdim=True)
    # Looking whether such a row exists is free on CPU; on a GPU it would wait for the queue.
    look = device.type == "cpu" and not torch.compiler.is_compiling()
    empty = None if look and not barred.any() else barred
    if backend == "flex":
        within = layout.mask_mod(rows, columns, device)
        blocks = create_block_mask(
            lambda b, h, i, j: within(b, h, i, j) & valid[b, j], B, None, mask.N, mask.M, device=str(device)
        )
        return replace(mask, blocks=blocks, empty=empty, valid=valid)
    if empty is not None:
        allowed = allowed | empty
    if backend == "sdpa":
        return replace(mask, bias=_bias(allowed, dtype), empty=empty, valid=valid)
    return replace(mask, allowed=allowed, empty=empty, valid=valid)


# Made outside inference mode, as the masks of a layout are: the first to ask may not be the one who trains.
@functools.lru_cache(maxsize=256)
def _without_padding(
    layout: Layout, rows: Names, columns: Names, device: torch.device, dtype: torch.dtype, backend: Backend
) -> Mask:
    if backend not in get_args(Backend):
        raise ConfigError(f"attention: expected a backend among {list(get_args(Backend))}, got {backend!r}")
    with torch.inference_mode(False):
        allowed = layout.dense(rows, columns, device)[None, None]
        mask = Mask(backend, allowed.shape[2], allowed.shape[3])
        empty = ~allowed.any(-1, keepdim=True)
        mask = replace(mask, empty=empty if empty.any() else None)
        if backend == "flex":
            return replace(mask, blocks=layout.flex(rows, columns, device))
        if layout.all_allowed(rows, columns):
            return mask
        allowed = allowed | empty
        return replace(mask, bias=_bias(allowed, dtype)) if backend == "sdpa" else replace(mask, allowed=allowed)


def _bias(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    zero = torch.zeros((), dtype=dtype, device=allowed.device)
    return torch.where(allowed, zero, -torch.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Float[Tensor, "B Hq N d"]:
    """Attention under a prepared mask; arguments and errors as in ``attention``."""
    _check(q, k, v, mask)
    out = _BACKENDS[mask.backend](q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale)
    return out if mask.empty is None else out.masked_fill(mask.empty, 0.0)


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
    if q.ndim != 4 or k.ndim != 4:
        expect_shape("q", q, "B Hq N d")
        expect_shape("k", k, "B Hk M d")
    (B, Hq, N, d), (Bk, Hk, M, dk) = q.shape, k.shape
    fits = (B, N, M, d) == (Bk, mask.N, mask.M, dk) and k.shape == v.shape and Hq % Hk == 0
    if fits and (mask.valid is None or mask.valid.shape[0] == B):
        return
    expect_shape("q", q, "B Hq N d", N=mask.N)
    expect_shape("k", k, "B Hk M d", B=B, M=mask.M, d=d)
    expect_shape("v", v, "B Hk M d", B=B, Hk=Hk, M=mask.M, d=d)
    if mask.valid is not None:
        expect_shape("valid", mask.valid, "B M", B=B)
    raise InputError(f"attention: expected a number of query heads that the key heads divide, got {Hq} and {Hk}")


def _reference(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    if mask.valid is not None:
        padded = ~mask.valid[:, None, :, None]
        k, v = k.masked_fill(padded, 0.0), v.masked_fill(padded, 0.0)  # 0 * NaN would be NaN
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = scale * q.float() @ k.float().transpose(-1, -2)
    if mask.allowed is not None:
        scores = scores.masked_fill(~mask.allowed, -torch.inf)
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    # Measured on CPU at 26 to 120 tokens: grouped heads inside SDPA are never slower than expanded keys, and a
    # quarter faster with gradients; an additive mask saves SDPA the conversion of a bool one on every call.
    return F.scaled_dot_product_attention(q, k, v, mask.bias, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    options: dict[str, Any] = {"block_mask": mask.blocks, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if not q.is_cpu:
        return _compiled_flex()(q, k, v, **options)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ConfigError(
            "attention: the backend 'flex' has no gradients on CPU. Train with backend='sdpa', or on a GPU; "
            "on CPU use 'flex' under torch.no_grad() only."
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")  # said in the docs
        return flex_attention(q, k, v, **options)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


_BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, Mask, float], Tensor]] = {
    "reference": _reference,
    "sdpa": _sdpa,
    "flex": _flex,
}


@dataclass(frozen=True, eq=False)
class Cache:
    """Keys and values of the blocks ``columns``, one pair per layer, to be read by blocks that run later.

    Exact because no cached row reads a column outside the cache, which is checked here and not assumed (it further
    takes that the cached tokens do not depend on what changes later, such as the flow time).

    keys, values: per layer ``B Hk M d``, M the tokens of ``columns`` in layout order. valid: ``B M``, None when all
    count. position: ``B 1``, or ``1 1`` for all samples; the position that the next token takes.

    Raises:
        ConfigError: a cached block reads a block outside; the message names both.
        InputError: keys, values or valid that do not have the columns' length.
    """

    keys: tuple[Float[Tensor, "B Hk M d"], ...]
    values: tuple[Float[Tensor, "B Hk M d"], ...]
    layout: Layout
    columns: tuple[str, ...]
    valid: Bool[Tensor, "B M"] | None
    position: Int64[Tensor, "b 1"]

    def __post_init__(self) -> None:
        columns = self.layout.select(self.columns)
        if leaks := self.layout.leaks(*columns):
            said = ", ".join(f"{row!r} reads {column!r}" for row, column in leaks)
            raise ConfigError(
                f"cache: expected blocks that read nothing outside {list(columns)}, but {said}. Keys of such blocks "
                "depend on columns that are not there yet; cache fewer blocks, or run all of them in one pass."
            )
        M = sum(self.layout.block(name).length for name in columns)
        if len(self.keys) != len(self.values):
            raise InputError(f"cache: expected keys and values per layer, got {len(self.keys)} and {len(self.values)}")
        for k, v in zip(self.keys, self.values, strict=True):
            if k.shape[2] != M or k.shape != v.shape:
                sizes = expect_shape("cached keys", k, "B Hk M d", M=M)
                expect_shape("cached values", v, "B Hk M d", **sizes)
        if self.valid is not None:
            expect_shape("cached valid", self.valid, "B M", M=M)

    def extend(
        self,
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
        columns: tuple[str, ...],
        valid: Bool[Tensor, "B n"] | None,
        position: Int64[Tensor, "b 1"],
    ) -> Cache:
        """A new cache that also holds the blocks ``columns``, all later in layout order; this one is unchanged.

        valid: of the new tokens, None when all count. position: what the token after them takes. Errors as above.
        """
        together = self.layout.select(self.columns + columns)
        if not len(keys) == len(values) == len(self.keys):
            raise InputError(f"cache: expected {len(self.keys)} layers, got {len(keys)} and {len(values)}")
        if self.valid is not None or valid is not None:
            old, new = (x[0].new_ones(len(x[0]), x[0].shape[2], dtype=torch.bool) for x in (self.keys, keys))
            valid = torch.cat([old if self.valid is None else self.valid, new if valid is None else valid], dim=1)
        joined = [
            tuple(torch.cat(pair, dim=2) for pair in zip(before, after, strict=True))
            for before, after in ((self.keys, keys), (self.values, values))
        ]
        return Cache(joined[0], joined[1], self.layout, together, valid, position)
