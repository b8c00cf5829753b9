"""Decoders: H query tokens that read the prefix's outputs by cross-attention, one query per step of the chunk.

``CrossAttention`` is Diffusion Policy's transformer (pre-norm, full or causal), ``Detr`` is ACT's (post-norm encoder
and decoder, learned queries). Who may look at whom is one layout, [latent | memory | time] -> [action]; tokens of the
memory that are not valid are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, cast, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from vola.cite import Source
from vola.errors import ConfigError, expect_positive
from vola.model.attention import Backend, attention
from vola.model.backbone import Context, Reader
from vola.model.conditioning import TimeToken, expect_inputs, zero_linear
from vola.model.layers import FeedForward
from vola.model.layout import Block, Causal, Full, Layout, Rule
from vola.model.networks import Ports


@dataclass(frozen=True)
class CrossAttention:
    """``layers`` pre-norm layers: self-attention over the chunk (``causal``: a step sees itself and earlier ones),
    cross-attention to the memory and the time token, feed-forward (GELU).

    A rule with one time per step of the chunk has it added to the steps' tokens in place of the time token.
    """

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Chi et al. 2023, Diffusion policy: Visuomotor policy learning via action diffusion",
            "section III-A, time-series diffusion transformer",
            "every step reads the whole memory; no dropout",
            "https://arxiv.org/abs/2303.04137",
        ),
    )
    width: int = 256
    layers: int = 8
    heads: int = 4
    hidden: int = 1024
    causal: bool = False

    def __post_init__(self) -> None:
        sizes = {"width": self.width, "layers": self.layers, "heads": self.heads, "hidden": self.hidden}
        _check_sizes("CrossAttention", **sizes)

    def reader(self, length: int) -> Reader:
        """The outputs of the prefix."""
        return Reader(outputs=True)

    def check(self, ports: Ports) -> None:
        """Every rule works with this network: queries know their step, and any time can be told."""


@dataclass(frozen=True)
class Detr:
    """``encoder`` post-norm layers over [latent, memory], ``decoder`` post-norm layers of H learned queries (ReLU).

    The decoder starts from zeros, plus the embedded x where the rule feeds one, plus the time where there is one. ACT's
    code builds seven decoder layers and uses the first: ``decoder=1``. ``encoder=0`` leaves encoding to the backbone.
    """

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Zhao et al. 2023, Learning fine-grained bimanual manipulation with low-cost hardware",
            "appendix C, transformer encoder and decoder of the released code",
            "one decoder layer, the one its output is taken from; no dropout",
            "https://arxiv.org/abs/2304.13705",
        ),
        Source(
            "Carion et al. 2020, End-to-end object detection with transformers",
            "section 3.2",
            "positions on queries and keys of every layer, never on values",
            "https://arxiv.org/abs/2005.12872",
        ),
    )
    width: int = 512
    encoder: int = 4
    decoder: int = 1
    heads: int = 8
    hidden: int = 3200

    def __post_init__(self) -> None:
        _check_sizes("Detr", width=self.width, decoder=self.decoder, heads=self.heads, hidden=self.hidden)
        if self.encoder:
            expect_positive("Detr", encoder=self.encoder)

    def reader(self, length: int) -> Reader:
        """The outputs of the prefix."""
        return Reader(outputs=True)

    def check(self, ports: Ports) -> None:
        """Every rule works with this network: queries know their step, and any time can be told."""


_MEMORY: tuple[str, ...] = ("memory",)
_TIMED: tuple[str, ...] = ("memory", "time")
_LATENT: tuple[str, ...] = ("latent", "memory")


def _check_sizes(where: str, width: int, heads: int, **sizes: int) -> None:
    expect_positive(where, width=width, heads=heads, **sizes)
    if width % heads or width % 2:
        raise ConfigError(
            f"{where}: expected an even width that the number of heads divides, got width={width} and heads={heads}"
        )


class Look(NamedTuple):
    """Rows (the action block, or the memory) look at columns of a layout; ``valid`` is of the columns."""

    layout: Layout
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    valid: Bool[Tensor, "B M"] | None = None


@lru_cache(maxsize=1024)
def decoder_layout(latent: int, memory: int, time: int, action: int, causal: bool = False) -> Layout:
    """[latent | memory | time], full, which [action], full or causal, reads. A length of 0 leaves the block out."""
    lengths = {"latent": latent, "memory": memory, "time": time}
    read = {name: n for name, n in lengths.items() if n}
    blocks = [Block(name, n) for name, n in read.items()]
    blocks.append(Block("action", action, Causal() if causal else Full()))
    rules = [Rule(a, b) for a in read for b in read if a != b] + [Rule("action", b) for b in read]
    return Layout(tuple(blocks), tuple(rules))


@final
class LayoutAttention(nn.Module):
    """Multi-head attention with a projection each for queries, keys, values and output, under a layout."""

    def __init__(self, width: int, heads: int, backend: Backend) -> None:
        super().__init__()
        self.heads, self.backend = heads, backend
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(
        self, q: Float[Tensor, "B N D"], k: Float[Tensor, "B M D"], v: Float[Tensor, "B M D"], look: Look
    ) -> Float[Tensor, "B N D"]:
        parts = (self.q(q), self.k(k), self.v(v))
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        attended = attention(
            q, k, v, layout=look.layout, rows=look.rows, columns=look.columns, valid=look.valid, backend=self.backend
        )
        return self.out(attended.transpose(1, 2).flatten(2))


@final
class CrossLayer(nn.Module):
    """Pre-norm: x + self-attention, + cross-attention, + feed-forward; the memory is read as it is."""

    def __init__(self, config: CrossAttention, backend: Backend) -> None:
        super().__init__()
        width = config.width
        self.self_norm, self.cross_norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = LayoutAttention(width, config.heads, backend)
        self.cross_attention = LayoutAttention(width, config.heads, backend)
        self.ffn = FeedForward(width, config.hidden, "gelu", bias=True)
        for linear in (self.self_attention.out, self.cross_attention.out, self.ffn.down):
            # Residual branches start small, so that depth does not scale the stream (GPT-2).
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5 * (3 * config.layers) ** -0.5)

    def forward(self, x: Tensor, memory: Tensor, within: Look, across: Look) -> Float[Tensor, "B H D"]:
        y = self.self_norm(x)
        x = x + self.self_attention(y, y, y, within)
        x = x + self.cross_attention(self.cross_norm(x), memory, memory, across)
        return x + self.ffn(self.ffn_norm(x))


@final
class CrossAttentionDecoder(nn.Module):
    """The network of ``CrossAttention``. The output map starts at zero; x is ignored where the rule feeds zeros."""

    def __init__(self, config: CrossAttention, ports: Ports) -> None:
        super().__init__()
        config.check(ports)
        self.config, self.ports = config, ports
        width = config.width
        self.memory = nn.Linear(ports.width, width)
        self.enter = nn.Linear(ports.A, width) if ports.noise else None
        self.step = nn.Parameter(0.02 * torch.randn(ports.H, width))
        if ports.time:
            self.time = TimeToken(width)
        if ports.latent:
            self.latent = nn.Linear(ports.latent, width)
        layers = nn.ModuleList(CrossLayer(config, ports.trunk.backend) for _ in range(config.layers))
        self.layers = cast("Sequence[CrossLayer]", layers)
        self.norm = nn.LayerNorm(width)
        self.leave = zero_linear(width, ports.out)

    def forward(
        self,
        context: Context,
        x: Float[Tensor, "B H A"],
        tau: Float[Tensor, " B"] | Float[Tensor, "B H"] | None,
        latent: Float[Tensor, "B Z"] | None = None,
    ) -> Float[Tensor, "B H out"]:
        """One pass. Raises InputError when x, tau or latent are not what the ports announce."""
        expect_inputs(self.ports, x, tau, latent)
        tokens = (self.step if self.enter is None else self.enter(x) + self.step).expand(x.shape[0], -1, -1)
        if latent is not None:
            tokens = tokens + self.latent(latent)[:, None]
        memory, valid, columns = self.memory(context.memory), context.memory_valid, _MEMORY
        if tau is not None:
            time = self.time(tau if tau.ndim == 2 else tau[:, None])
            if self.ports.per_step_time:
                tokens = tokens + time
            else:
                memory, valid, columns = torch.cat([memory, time], dim=1), _one_more(valid, False), _TIMED
        M, times = context.memory.shape[1], len(columns) - 1
        layout = decoder_layout(0, M, times, self.ports.H, self.config.causal)
        within, across = Look(layout, ("action",), ("action",)), Look(layout, ("action",), columns, valid)
        for layer in self.layers:
            tokens = layer(tokens, memory, within, across)
        return self.leave(self.norm(tokens))


def _one_more(valid: Tensor | None, first: bool) -> Tensor | None:
    """``valid`` of a memory that has got one valid token more, at its start or its end."""
    if valid is None:
        return None
    one = valid.new_ones(valid.shape[0], 1)
    return torch.cat([one, valid] if first else [valid, one], dim=1)


@final
class DetrLayer(nn.Module):
    """Post-norm layer of DETR: self-attention, cross-attention if ``cross``, feed-forward with ReLU."""

    def __init__(self, config: Detr, backend: Backend, cross: bool) -> None:
        super().__init__()
        width = config.width
        self.self_attention, self.self_norm = LayoutAttention(width, config.heads, backend), nn.LayerNorm(width)
        if cross:
            self.cross_attention, self.cross_norm = LayoutAttention(width, config.heads, backend), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, config.hidden), nn.Linear(config.hidden, width)
        self.ffn_norm = nn.LayerNorm(width)

    def forward(
        self, x: Tensor, position: Tensor | None, within: Look, read: tuple[Tensor, Tensor, Look] | None = None
    ) -> Float[Tensor, "B N D"]:
        """``position`` is added to queries and keys. ``read`` is what cross-attention reads: the memory, the memory
        with its positions, and who sees what."""
        placed = _placed(x, position)
        x = self.self_norm(x + self.self_attention(placed, placed, x, within))
        if read is not None:
            memory, placed_memory, across = read
            x = self.cross_norm(x + self.cross_attention(_placed(x, position), placed_memory, memory, across))
        return self.ffn_norm(x + self.down(F.relu(self.up(x))))


def _placed(x: Tensor, position: Tensor | None) -> Tensor:
    return x if position is None else x + position.to(x.dtype)


@final
class DetrDecoder(nn.Module):
    """The network of ``Detr``. The output map starts at zero, matrices of the layers as Xavier has them (ACT)."""

    def __init__(self, config: Detr, ports: Ports) -> None:
        super().__init__()
        config.check(ports)
        self.config, self.ports = config, ports
        width, backend = config.width, ports.trunk.backend
        self.memory = nn.Linear(ports.width, width)
        if ports.latent:
            self.latent = nn.Linear(ports.latent, width)
            self.latent_position = nn.Parameter(torch.randn(1, width))
        if ports.noise:
            self.enter = nn.Linear(ports.A, width)
        if ports.time:
            self.time = TimeToken(width)
        self.query = nn.Parameter(torch.randn(ports.H, width))
        encoder = nn.ModuleList(DetrLayer(config, backend, cross=False) for _ in range(config.encoder))
        decoder = nn.ModuleList(DetrLayer(config, backend, cross=True) for _ in range(config.decoder))
        for weight in (*encoder.parameters(), *decoder.parameters()):
            if weight.ndim == 2:
                nn.init.xavier_uniform_(weight)
        self.encoder = cast("Sequence[DetrLayer]", encoder)
        self.decoder = cast("Sequence[DetrLayer]", decoder)
        self.norm = nn.LayerNorm(width)
        self.leave = zero_linear(width, ports.out)

    def forward(
        self,
        context: Context,
        x: Float[Tensor, "B H A"],
        tau: Float[Tensor, " B"] | Float[Tensor, "B H"] | None,
        latent: Float[Tensor, "B Z"] | None = None,
    ) -> Float[Tensor, "B H out"]:
        """One pass; the backbone's tokens say themselves where they stand. Raises InputError when x, tau or latent are
        not what the ports announce."""
        expect_inputs(self.ports, x, tau, latent)
        return self.leave(self.decode(self.memory(context.memory), context.memory_valid, x, tau, latent))

    def decode(
        self,
        memory: Float[Tensor, "B M W"],
        valid: Bool[Tensor, "B M"] | None,
        x: Float[Tensor, "B H A"],
        tau: Float[Tensor, " B"] | Float[Tensor, "B H"] | None,
        latent: Float[Tensor, "B Z"] | None,
        positions: Float[Tensor, "b M W"] | None = None,
    ) -> Float[Tensor, "B H W"]:
        """The decoder's normed output. ``positions`` of the memory are added to queries and keys of every layer."""
        M, H, columns = memory.shape[1], self.ports.H, _MEMORY
        if latent is not None:
            token = self.latent(latent)[:, None]
            memory, valid, columns = torch.cat([token.to(memory.dtype), memory], dim=1), _one_more(valid, True), _LATENT
            place = self.latent_position[None]
            others = place.new_zeros(1, M, place.shape[-1]) if positions is None else positions
            positions = torch.cat([place.expand(others.shape[0], -1, -1), others], dim=1)
        layout = decoder_layout(len(columns) - 1, M, 0, H)
        for layer in self.encoder:
            memory = layer(memory, positions, Look(layout, columns, columns, valid))
        target = self.query.new_zeros(x.shape[0], H, self.config.width)
        if self.ports.noise:
            target = target + self.enter(x)
        if tau is not None:
            target = target + self.time(tau if tau.ndim == 2 else tau[:, None])
        within = Look(layout, ("action",), ("action",))
        read = (memory, _placed(memory, positions), Look(layout, ("action",), columns, valid))
        for layer in self.decoder:
            target = layer(target, self.query, within, read)
        return self.norm(target)
