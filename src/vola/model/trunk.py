"""The transformer: blocks of tokens, one or more experts, one shared attention.

An ``Expert`` is a stack of layers with its own widths, norms, projections and feed-forwards. A ``Segment`` is a run of
consecutive layout blocks that one expert owns. ``run`` sends segments through their experts: in each layer every
segment makes queries, keys and values, one attention under the layout joins them all, and each expert takes its rows
back. With one expert this is GPT, RT-2, OpenVLA or Octo; with two it is pi0.

Weights are drawn by torch's current generator, which ``System.build`` seeds and restores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vola.cite import Source
from vola.errors import ConfigError, expect_positive, expect_shape
from vola.model.attention import Cache, Mask, attend, prepare
from vola.model.layers import Activation, FeedForward
from vola.model.layout import Layout
from vola.model.norms import NormKind, make_norm
from vola.model.positions import Learned, Positions, Rotary, Sinusoidal, rotary_angles, rotate, sinusoidal


@dataclass(frozen=True)
class TrunkConfig:
    """What all experts share: depth, attention heads, KV heads (grouped when fewer), head dim, positions, backend."""

    sources: ClassVar[tuple[Source, ...]] = (
        Source("Vaswani et al. 2017, Attention is all you need", "eq. 1", "", "https://arxiv.org/abs/1706.03762"),
    )
    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: Positions
    backend: Literal["reference", "sdpa", "flex"] = "sdpa"

    def __post_init__(self) -> None:
        sizes = {"depth": self.depth, "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        expect_positive("trunk", **sizes)
        if self.heads % self.kv_heads:
            raise ConfigError(f"trunk: expected heads divisible by kv_heads, got {self.heads} and {self.kv_heads}")
        if isinstance(self.positions, Rotary) and self.head_dim % 2:
            raise ConfigError(f"trunk: rotary positions need an even head_dim, got {self.head_dim}")


@dataclass(frozen=True)
class ExpertConfig:
    """What an expert has of its own. ``condition`` is the width of the vector that adaptive norms read (else 0)."""

    width: int
    hidden: int
    norm: NormKind = "rms"
    activation: Activation = "gelu"
    bias: bool = False
    condition: int = 0

    def __post_init__(self) -> None:
        expect_positive("expert", width=self.width, hidden=self.hidden)


@final
class ExpertLayer(nn.Module):
    """Pre-norm layer, split at the attention: ``project`` before it, ``finish`` after it.

    ``outputs`` False leaves out what ``finish`` needs: a layer that is only ever read by others.
    """

    def __init__(self, trunk: TrunkConfig, config: ExpertConfig, outputs: bool = True) -> None:
        super().__init__()
        q, kv = trunk.heads * trunk.head_dim, trunk.kv_heads * trunk.head_dim
        self.sizes, self.head_dim = (q, kv, kv), trunk.head_dim
        self.attention_norm = make_norm(config.norm, config.width, config.condition)
        self.qkv = nn.Linear(config.width, q + 2 * kv, bias=config.bias)
        self.outputs = outputs
        if outputs:
            self.out = nn.Linear(q, config.width, bias=config.bias)
            self.ffn_norm = make_norm(config.norm, config.width, config.condition)
            self.ffn = FeedForward(config.width, config.hidden, config.activation, config.bias)

    def project(
        self, x: Float[Tensor, "B N D"], condition: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys, values ``B heads N d`` and the gate of the attention branch."""
        y, gate = self.attention_norm(x, condition)
        parts = self.qkv(y).split(self.sizes, dim=-1)
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in parts)
        return q, k, v, gate

    def finish(self, x: Tensor, attended: Tensor, gate: Tensor | None, condition: Tensor | None) -> Tensor:
        """Residual attention branch, then residual feed-forward; ``attended`` is ``B heads N d``."""
        branch = self.out(attended.transpose(1, 2).flatten(2))
        x = x + (branch if gate is None else gate * branch)
        y, gate = self.ffn_norm(x, condition)
        branch = self.ffn(y)
        return x + (branch if gate is None else gate * branch)


@final
class Expert(nn.Module):
    """A stack of ``depth`` layers and the final norm; it computes nothing by itself, ``run`` drives it.

    ``outputs`` False makes an expert whose keys and values are all that anybody uses (pi0's prefix): its last layer
    ends after them, and there is no final norm.
    """

    def __init__(self, trunk: TrunkConfig, config: ExpertConfig, outputs: bool = True) -> None:
        super().__init__()
        self.trunk, self.config, self.outputs = trunk, config, outputs
        last = trunk.depth - 1
        layers = nn.ModuleList(ExpertLayer(trunk, config, outputs or i < last) for i in range(trunk.depth))
        self.layers = cast("Sequence[ExpertLayer]", layers)
        if outputs:
            self.norm = make_norm(config.norm, config.width, config.condition)
        if isinstance(trunk.positions, Learned):
            self.position = nn.Parameter(0.02 * torch.randn(trunk.positions.length, config.width))
        for layer in self.layers[: trunk.depth if outputs else last]:
            # Residual branches start small, so that depth does not scale the stream (GPT-2).
            for linear in (layer.out, layer.ffn.down):
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5 * (2 * trunk.depth) ** -0.5)

    def add_positions(self, x: Tensor, position: Tensor) -> Tensor:
        """Tokens with the added kinds of positions; rotary ones act inside attention instead."""
        positions = self.trunk.positions
        if isinstance(positions, Sinusoidal):
            return x + sinusoidal(position, x.shape[-1], positions.base).to(x.dtype)
        if isinstance(positions, Learned):
            if int(position.max()) >= positions.length:
                raise ConfigError(
                    f"learned positions: {positions.length} exist, token {int(position.max())} was asked for. "
                    "Raise Learned(length=...) or shorten the instruction."
                )
            return x + self.position[position].to(x.dtype)
        return x


@dataclass(frozen=True)
class Segment:
    """Tokens of the consecutive layout blocks ``blocks``, owned by ``expert``.

    ``valid`` None means all valid. ``condition`` feeds adaptive norms: one vector per sample, or one per token.
    """

    expert: Expert
    blocks: tuple[str, ...]
    tokens: Float[Tensor, "B N D"]
    valid: Bool[Tensor, "B N"] | None = None
    condition: Float[Tensor, "B E"] | Float[Tensor, "B N E"] | None = None


def run(segments: Sequence[Segment], layout: Layout, cache: Cache | None = None) -> tuple[tuple[Tensor, ...], Cache]:
    """Send segments through their experts under one layout.

    Args:
        segments: in layout order; together with the cached blocks they make the columns attention can see.
        cache: keys and values of blocks that ran before; they are read, never written to.

    Returns:
        The normed output ``B N D`` of each segment whose expert has outputs, and the cache of all columns.

    Raises:
        ConfigError: segments and layout disagree, or the cached blocks read a later column (see Layout.cacheable).
    """
    trunk = segments[0].expert.trunk
    rows = tuple(name for s in segments for name in s.blocks)
    columns = (cache.columns if cache else ()) + rows
    for s in segments:
        n = sum(layout.block(name).length for name in s.blocks)
        expect_shape(f"tokens of {' + '.join(s.blocks)}", s.tokens, "B N D", N=n, D=s.expert.config.width)
    valid, row_position, next_position = _valid_and_positions(segments, cache)
    angles = None
    if isinstance(trunk.positions, Rotary):
        angles = rotary_angles(row_position, trunk.head_dim, trunk.positions.base)

    lengths = [s.tokens.shape[1] for s in segments]
    xs = [
        s.expert.add_positions(s.tokens, p) for s, p in zip(segments, row_position.split(lengths, dim=1), strict=True)
    ]
    mask: Mask | None = None
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for depth in range(trunk.depth):
        layers = [s.expert.layers[depth] for s in segments]
        parts = [layer.project(x, s.condition) for layer, x, s in zip(layers, xs, segments, strict=True)]
        q, k, v = _join([p[0] for p in parts]), _join([p[1] for p in parts]), _join([p[2] for p in parts])
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        if cache is not None:
            k, v = torch.cat([cache.keys[depth], k], dim=2), torch.cat([cache.values[depth], v], dim=2)
        keys.append(k)
        values.append(v)
        if not any(layer.outputs for layer in layers):
            break
        if mask is None:  # all layers share it; the dtype is known only now, under autocast
            mask = prepare(layout, rows, columns, valid, q.device, q.dtype, trunk.backend)
        attended = attend(q, k, v, mask).split(lengths, dim=2)
        xs = [
            layer.finish(x, a, p[3], s.condition) if layer.outputs else x
            for layer, x, a, p, s in zip(layers, xs, attended, parts, segments, strict=True)
        ]
    cache = Cache(tuple(keys), tuple(values), layout, columns, valid, next_position)
    normed = [s.expert.norm(x, s.condition)[0] for s, x in zip(segments, xs, strict=True) if s.expert.outputs]
    return tuple(normed), cache


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)


def _valid_and_positions(segments: Sequence[Segment], cache: Cache | None) -> tuple[Tensor | None, Tensor, Tensor]:
    """Validity ``B M`` of all columns (None: all valid), positions ``b N`` of the rows, position after the last one.

    b is 1 when nothing is invalid, so that the common case shares one row of angles.
    """
    first = segments[0].tokens
    n = sum(s.tokens.shape[1] for s in segments)
    start = cache.position if cache else torch.zeros(1, 1, dtype=torch.long, device=first.device)
    cached_valid = cache.valid if cache else None
    if cached_valid is None and all(s.valid is None for s in segments):
        return None, start + torch.arange(n, device=first.device), start + n
    B = first.shape[0]

    def full(valid: Tensor | None, length: int) -> Tensor:
        return torch.ones(B, length, dtype=torch.bool, device=first.device) if valid is None else valid

    own = torch.cat([full(s.valid, s.tokens.shape[1]) for s in segments], dim=1)
    counts = own.cumsum(dim=1)
    row_position = (start + counts - 1).clamp(min=0)
    valid = own if cache is None else torch.cat([full(cached_valid, cache.keys[0].shape[2]), own], dim=1)
    return valid, row_position, start + counts[:, -1:]
