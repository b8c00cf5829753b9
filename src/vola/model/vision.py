"""Images -> tokens. Two encoders behind one call, ``encoder(image, sentence) -> B n D``.

``ConvStem``: two strided convolutions; language multiplies the first feature map (FiLM), and the last map is flattened
and mixed into a few global tokens, so that every pixel reaches every token. Without both, nothing binds words to
objects within minutes of training (``benchmarks/`` and the built-in tasks measure it).
``PatchViT``: the usual patch tokens with self-attention among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vola.cite import Source
from vola.errors import ConfigError, expect_positive
from vola.model.layout import Block, Full, Layout
from vola.model.positions import Learned
from vola.model.trunk import Expert, ExpertConfig, Segment, TrunkConfig, run


@dataclass(frozen=True)
class ConvStem:
    """Convolution ``patch`` x ``patch`` (``channels`` maps), FiLM by the sentence, GELU, convolution
    ``merge`` x ``merge`` (``features`` maps), GELU, flatten, linear to ``tokens`` global tokens.

    Kernels equal strides, so both convolutions are matrix products over disjoint patches, and are computed as such.
    ``patch_tokens`` also passes the last feature map on, one token per position, behind the global ones.
    Source: FiLM (Perez et al. 2018, eq. 2) placed as RT-1 does, after the convolution.
    """

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Perez et al. 2018, FiLM: visual reasoning with a general conditioning layer",
            "eq. 2",
            "(1 + scale) x + shift, after the first convolution as in RT-1",
            "https://arxiv.org/abs/1709.07871",
        ),
    )
    channels: int = 48
    patch: int = 4
    merge: int = 2
    features: int = 32
    tokens: int = 8
    film: bool = True
    patch_tokens: bool = False

    def __post_init__(self) -> None:
        sizes = {"channels": self.channels, "patch": self.patch, "merge": self.merge}
        expect_positive("vision", **sizes, features=self.features, tokens=self.tokens)


@dataclass(frozen=True)
class PatchViT:
    """Patches ``patch`` x ``patch`` -> ``depth`` pre-norm layers of full attention, learned positions."""

    patch: int = 8
    depth: int = 2
    heads: int = 4
    film: bool = False

    def __post_init__(self) -> None:
        expect_positive("vision", patch=self.patch, depth=self.depth, heads=self.heads)


Vision = ConvStem | PatchViT


def tokens_per_image(config: Vision, height: int, width: int) -> int:
    """How many tokens one image becomes.

    Raises:
        ConfigError: the image does not divide into whole patches.
    """
    step = config.patch * (config.merge if isinstance(config, ConvStem) else 1)
    if height % step or width % step:
        raise ConfigError(
            f"vision: expected an image size divisible by {step}, got {height}x{width}. "
            "Set System.image_size to a multiple, or change the patch size."
        )
    grid = (height // step) * (width // step)
    return (config.tokens + grid * config.patch_tokens) if isinstance(config, ConvStem) else grid


@final
class FiLM(nn.Module):
    """(1 + scale) * x + shift per channel, both linear in the sentence; Perez et al. 2018."""

    def __init__(self, channels: int, sentence: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(sentence, 2 * channels)

    def forward(self, x: Float[Tensor, "B n C"], sentence: Float[Tensor, "B E"]) -> Float[Tensor, "B n C"]:
        scale, shift = self.modulation(sentence)[:, None].chunk(2, dim=-1)
        return torch.addcmul(shift, x, 1 + scale)


@final
class ConvEncoder(nn.Module):
    """The network of ``ConvStem``."""

    def __init__(self, config: ConvStem, width: int, sentence: int, height: int, columns: int) -> None:
        super().__init__()
        self.config, self.width = config, width
        step = config.patch * config.merge
        self.grid = (height // step, columns // step)
        cells = self.grid[0] * self.grid[1]
        self.patches = nn.Linear(3 * config.patch**2, config.channels)
        self.film = FiLM(config.channels, sentence) if config.film else None
        self.merge = nn.Linear(config.merge**2 * config.channels, config.features)
        self.globals = nn.Linear(cells * config.features, config.tokens * width)
        if config.patch_tokens:
            self.enter = nn.Linear(config.features, width)
            self.cell = nn.Parameter(0.02 * torch.randn(cells, width))

    def forward(self, image: Float[Tensor, "B C Y X"], sentence: Float[Tensor, "B E"]) -> Float[Tensor, "B n D"]:
        (rows, columns), p, m = self.grid, self.config.patch, self.config.merge
        x = image.reshape(-1, 3, rows, m, p, columns, m, p)
        x = x.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, rows * columns * m * m, 3 * p * p)
        x = self.patches(x)
        if self.film is not None:
            x = self.film(x, sentence)
        x = F.gelu(x).view(-1, rows * columns, m * m * self.config.channels)
        x = F.gelu(self.merge(x))
        tokens = self.globals(x.flatten(1)).unflatten(1, (self.config.tokens, self.width))
        if not self.config.patch_tokens:
            return tokens
        return torch.cat([tokens, self.enter(x) + self.cell], dim=1)


@final
class PatchEncoder(nn.Module):
    """The network of ``PatchViT``; FiLM (optional) acts on the patch embeddings."""

    def __init__(self, config: PatchViT, width: int, sentence: int, height: int, columns: int) -> None:
        super().__init__()
        if width % config.heads:
            raise ConfigError(f"vision: expected a width divisible by PatchViT.heads, got {width} and {config.heads}")
        grid = (height // config.patch) * (columns // config.patch)
        trunk = TrunkConfig(config.depth, config.heads, config.heads, width // config.heads, Learned(grid))
        self.layout = Layout((Block("patches", grid, Full()),), ())
        self.patches = nn.Conv2d(3, width, config.patch, stride=config.patch)
        self.film = FiLM(width, sentence) if config.film else None
        self.expert = Expert(trunk, ExpertConfig(width, 4 * width, norm="layer", bias=True))

    def forward(self, image: Float[Tensor, "B C Y X"], sentence: Float[Tensor, "B E"]) -> Float[Tensor, "B n D"]:
        x = self.patches(image).flatten(2).transpose(1, 2)
        if self.film is not None:
            x = self.film(x, sentence)
        (tokens,), _ = run([Segment(self.expert, ("patches",), x)], self.layout)
        return tokens


def make_encoder(config: Vision, width: int, sentence: int, height: int, columns: int) -> nn.Module:
    """The encoder that a config names, for images of ``height`` x ``columns`` and a sentence vector of that width."""
    tokens_per_image(config, height, columns)
    if isinstance(config, ConvStem):
        return ConvEncoder(config, width, sentence, height, columns)
    return PatchEncoder(config, width, sentence, height, columns)
