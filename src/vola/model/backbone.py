"""Observation -> Context: what the robot sees, is told and feels, as keys and values that a head reads.

The prefix is  image | text | state | readout  (``layouts.observed``): images and text see each other, the state sees
all of them and itself, readouts see everything and nobody sees them. A head inside the trunk reads the prefix's keys
and values, any other head its outputs. A camera that is missing, a frame before the start of an episode and text
padding are invalid tokens: attention never reads them and they do not shift positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from vola.errors import ConfigError
from vola.model import layouts
from vola.model.attention import Cache
from vola.model.language import WordEmbedding, WordEncoder
from vola.model.layout import Full, Inner, Layout
from vola.model.trunk import Expert, ExpertConfig, Segment, TrunkConfig, run
from vola.model.vision import Vision, make_encoder, tokens_per_image


@dataclass(frozen=True)
class BackboneConfig:
    """The parts of the prefix. One image encoder serves all cameras; a camera embedding tells them apart."""

    vision: Vision
    language: WordEmbedding
    expert: ExpertConfig


@dataclass(frozen=True)
class Inputs:
    """An observation ready for the model: images in [-1, 1] ``B T C Y X``, normalised state, word ids.

    A ``*_valid`` of None means that everything is valid.
    """

    images: Mapping[str, Float[Tensor, "B T C Y X"]]
    images_valid: Mapping[str, Bool[Tensor, "B T"] | None]
    state: Float[Tensor, "B T S"]
    state_valid: Bool[Tensor, "B T"] | None
    words: Int64[Tensor, "B N"]
    words_valid: Bool[Tensor, "B N"] | None


@dataclass(frozen=True)
class Reader:
    """What a head wants of the prefix. ``action`` tokens of its own inside the trunk, attending as ``inner`` says;
    ``readouts`` collecting tokens; ``outputs``: the last layer's outputs; ``words`` further entries of the vocabulary.
    """

    action: int = 0
    inner: Inner = Full()
    readouts: int = 0
    outputs: bool = False
    words: int = 0


@dataclass(frozen=True)
class Context:
    """What a head sees of the observation: the prefix segment, the layout, and the prefix's keys and values.

    ``cache`` None makes every head inside the trunk recompute the prefix together with its own tokens: the slow path
    that the cached one is tested against. ``outputs`` are the prefix's outputs, None unless the head wants them.
    """

    inputs: Inputs
    language: WordEncoder
    segment: Segment
    layout: Layout
    cache: Cache | None
    outputs: Float[Tensor, "B N D"] | None

    @property
    def size(self) -> int:
        """B."""
        return int(self.segment.tokens.shape[0])

    @property
    def readouts(self) -> int:
        """Number of readout tokens; they are the last of the prefix."""
        return self.layout.block("readout").length if "readout" in self.layout.names else 0

    @property
    def memory(self) -> Float[Tensor, "B M D"]:
        """Outputs of image, text and state tokens. Raises ConfigError when the head did not ask for outputs."""
        return self._outputs()[:, : self.segment.tokens.shape[1] - self.readouts]

    @property
    def memory_valid(self) -> Bool[Tensor, "B M"] | None:
        """Which memory tokens count; None when all do."""
        valid = self.segment.valid
        return valid if valid is None else valid[:, : valid.shape[1] - self.readouts]

    @property
    def readout(self) -> Float[Tensor, "B n D"]:
        """Outputs of the readout tokens. Raises ConfigError when the head did not ask for them."""
        if not self.readouts:
            raise ConfigError("context: expected readout tokens, got none. The network must ask for them (Reader).")
        return self._outputs()[:, self.segment.tokens.shape[1] - self.readouts :]

    def _outputs(self) -> Tensor:
        if self.outputs is None:
            raise ConfigError("context: expected the prefix's outputs, got none. The network must ask (Reader).")
        return self.outputs

    def read(self, suffix: Segment, layout: Layout | None = None) -> Float[Tensor, "B n D"]:
        """Run suffix tokens against the prefix and return their outputs; ``layout`` if not the context's own."""
        layout = layout or self.layout
        if self.cache is not None:
            return run([suffix], layout, self.cache)[0][0]
        return run([self.segment, suffix], layout)[0][-1]

    def extend(self, suffix: Segment, layout: Layout, cache: Cache) -> tuple[Float[Tensor, "B n D"], Cache]:
        """Run suffix tokens against a cache that holds the prefix and more; their outputs, and the longer cache."""
        outputs, longer = run([suffix], layout, cache)
        return outputs[0], longer


@final
class Backbone(nn.Module):
    """Encoders and the prefix expert.

    Args:
        cameras: their names; an empty tuple makes a blind policy.
        image_size: rows, columns every image has been resized to.
        T: observation window. reader: what the head wants of the prefix.
    """

    image_mean: Tensor
    image_std: Tensor

    def __init__(
        self,
        config: BackboneConfig,
        trunk: TrunkConfig,
        cameras: tuple[str, ...],
        image_size: tuple[int, int],
        S: int,
        T: int,
        vocabulary: int,
        reader: Reader,
    ) -> None:
        super().__init__()
        width, sentence = config.expert.width, config.language.width
        self.cameras, self.T, self.reader = cameras, T, reader
        self.image_tokens = tokens_per_image(config.vision, *image_size) if cameras else 0
        self.language = WordEncoder(config.language, vocabulary + reader.words, width)
        self.state = nn.Linear(S, width) if S else None
        self.expert = Expert(trunk, config.expert, outputs=reader.outputs)
        if cameras:
            self.vision = make_encoder(config.vision, width, sentence, *image_size)
            self.camera = nn.Parameter(0.02 * torch.randn(len(cameras), width))
            self.register_buffer("image_mean", torch.zeros(len(cameras), 3))
            self.register_buffer("image_std", torch.ones(len(cameras), 3))
        if T > 1:
            self.time = nn.Parameter(0.02 * torch.randn(T, width))
        if reader.readouts:
            self.readout = nn.Parameter(0.02 * torch.randn(reader.readouts, width))

    def layout(self, words: int) -> Layout:
        """The whole attention layout for an instruction of ``words`` tokens."""
        state = self.T if self.state is not None else 0
        image, r = len(self.cameras) * self.T * self.image_tokens, self.reader
        return layouts.observed(image, words, state, r.readouts, r.action, r.inner)

    def forward(self, inputs: Inputs, cached: bool = True) -> Context:
        """Encode the observation; ``cached`` False leaves the keys and values to the head (see Context)."""
        words, sentence = self.language(inputs.words, inputs.words_valid)
        parts, valids = [], []
        for i, camera in enumerate(self.cameras):
            tokens, valid = self._see(inputs.images[camera], inputs.images_valid[camera], sentence, i)
            parts.append(tokens)
            valids.append(valid)
        parts.append(words)
        valids.append(inputs.words_valid)
        if self.state is not None:
            state = self.state(inputs.state)
            parts.append(state + self.time if self.T > 1 else state)
            valids.append(inputs.state_valid)
        if self.reader.readouts:
            parts.append(self.readout.expand(words.shape[0], -1, -1).to(words.dtype))
            valids.append(None)
        layout = self.layout(words.shape[1])
        blocks = tuple(name for name in layout.names if name != "action")
        segment = Segment(self.expert, blocks, torch.cat(parts, dim=1), _join_valid(parts, valids))
        outputs, cache = None, None
        if cached or self.reader.outputs:
            made, cache = run([segment], layout)
            outputs = made[0] if self.reader.outputs else None
        return Context(inputs, self.language, segment, layout, cache if cached else None, outputs)

    def _see(self, image: Tensor, valid: Tensor | None, sentence: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        """Tokens ``B T*n D`` of one camera and their validity."""
        B, T = image.shape[:2]
        scale = self.image_std[i, :, None, None].reciprocal()
        flat = torch.addcmul(-self.image_mean[i, :, None, None] * scale, image.flatten(0, 1), scale)
        said = sentence if T == 1 else sentence.repeat_interleave(T, dim=0)
        tokens = self.vision(flat, said).unflatten(0, (B, T)) + self.camera[i]
        if T > 1:
            tokens = tokens + self.time[:, None]
        if valid is not None:
            valid = valid.repeat_interleave(self.image_tokens, dim=1)
        return tokens.flatten(1, 2), valid


def _join_valid(parts: list[Tensor], valids: list[Tensor | None]) -> Tensor | None:
    if all(v is None for v in valids):
        return None
    return torch.cat(
        [
            torch.ones(p.shape[:2], dtype=torch.bool, device=p.device) if v is None else v
            for p, v in zip(parts, valids, strict=True)
        ],
        dim=1,
    )
