"""Policy = prepare o backbone o head o inverse: a function of weights, observation and generators.

It holds no queue, no counter and no device logic. Training, held-out evaluation and rollouts all go through
the same ``prepare``, so there is no second preprocessing that could drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from vola.data.stats import Normaliser
from vola.data.transforms import Transforms, resize_images
from vola.errors import ConfigError, InputError, NonFiniteError
from vola.heads.base import Drawn, Head, Loss
from vola.heads.flow import FlowHead
from vola.heads.guidance import GuideTensors
from vola.model.backbone import Backbone, Context, Inputs
from vola.tokenizers.text import TextTokenizer
from vola.types import Batch, Chunk, Guide, Observation, RobotSpec


@final
class Policy(nn.Module):
    """A trained (or trainable) policy for the robot ``spec``.

    Args:
        image_size: rows, columns that images are resized to. T, H: observation window, chunk length.
        transforms: between the dataset's actions and what is normalised, e.g. relative actions.
    """

    def __init__(
        self,
        spec: RobotSpec,
        image_size: tuple[int, int],
        T: int,
        H: int,
        transforms: Transforms,
        state_normaliser: Normaliser,
        action_normaliser: Normaliser,
        tokenizer: TextTokenizer,
        backbone: Backbone,
        head: Head,
    ) -> None:
        super().__init__()
        self.spec, self.image_size, self.T, self.H = spec, image_size, T, H
        self.transforms = transforms
        self.state_normaliser, self.action_normaliser = state_normaliser, action_normaliser
        self.tokenizer = tokenizer
        self.backbone, self.head = backbone, head

    @property
    def observation_window(self) -> int:
        """T."""
        return self.T

    @property
    def chunk_length(self) -> int:
        """H."""
        return self.H

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def prepare(self, observation: Observation) -> Inputs:
        """Check, resize, scale to [-1, 1], normalise, tokenize: the only way into the model.

        Raises:
            InputError: what ``Observation.check`` refuses, or another observation window than T.
        """
        observation.check(self.spec)
        if observation.state.shape[1] != self.T:
            raise InputError(
                f"observation: expected a window of T={self.T} frames, got {observation.state.shape[1]}. "
                "Collect the last T frames; mark frames before the episode's start invalid."
            )
        state = np.where(observation.state_valid[..., None], self.state_normaliser.encode(observation.state), 0)
        ids, words_valid = self.tokenizer.encode(observation.instruction)
        return Inputs(
            images={name: self._pixels(image) for name, image in observation.images.items()},
            images_valid={name: self._mask(v) for name, v in observation.images_valid.items()},
            state=torch.from_numpy(state.astype(np.float32)).to(self.device),
            state_valid=self._mask(observation.state_valid),
            words=torch.from_numpy(ids).to(self.device),
            words_valid=self._mask(words_valid),
        )

    def _pixels(self, image: np.ndarray) -> Tensor:
        B, T = image.shape[:2]
        if image.shape[-2:] != self.image_size:
            flat = resize_images(image.reshape(B * T, *image.shape[2:]), *self.image_size)
            image = flat.reshape(B, T, *flat.shape[1:])
        return torch.from_numpy(np.ascontiguousarray(image)).to(self.device).float().mul_(1 / 127.5).sub_(1)

    def _mask(self, valid: np.ndarray) -> Tensor | None:
        return None if valid.all() else torch.from_numpy(np.ascontiguousarray(valid)).to(self.device)

    def targets(self, batch: Batch) -> Float[Tensor, "B H A"]:
        """The chunk as the head sees it: transformed and normalised; padded steps are zeros.

        Raises:
            NonFiniteError: a valid action is NaN or infinite; names episode, frame, step and dimension.
        """
        chunk = batch.chunk
        chunk.check(self.spec.action, self.H)
        bad = ~np.isfinite(chunk.actions) & chunk.valid[..., None]
        if bad.any():
            b, h, a = (int(i[0]) for i in np.nonzero(bad))
            raise NonFiniteError(
                f"action: expected finite numbers, got {chunk.actions[b, h, a]} in episode {batch.episode[b]}, frame "
                f"{batch.frame[b]}, step {h}, dimension {a} ({self.spec.action.names[a]}). Repair or drop the episode."
            )
        actions = self.transforms.encode(batch.observation, chunk.actions)
        actions = np.where(chunk.valid[..., None], self.action_normaliser.encode(actions), 0)
        return torch.from_numpy(actions.astype(np.float32)).to(self.device)

    def loss(self, batch: Batch, rng: torch.Generator) -> Loss:
        """The head's loss of a training batch, by parts.

        Raises:
            NonFiniteError: NaN or infinity in the batch; names episode and frame.
        """
        bad = ~np.isfinite(batch.observation.state) & batch.observation.state_valid[..., None]
        if bad.any():
            b, _, s = (int(i[0]) for i in np.nonzero(bad))
            raise NonFiniteError(
                f"state: expected finite numbers, got {batch.observation.state[bad][0]} in episode {batch.episode[b]}, "
                f"frame {batch.frame[b]}, dimension {s} ({self.spec.state.names[s]}). Repair or drop the episode."
            )
        context = self.backbone(self.prepare(batch.observation))
        valid = torch.from_numpy(np.ascontiguousarray(batch.chunk.valid)).to(self.device)
        return self.head.loss(context, self.targets(batch), valid, rng)

    def log_prob(self, batch: Batch, rng: torch.Generator) -> Float[Tensor, " B"]:
        """Log probability (nats) of each sample's chunk in normalised units; what it is of, the head says.

        Raises:
            ConfigError: the head's rule defines none.
        """
        context = self.backbone(self.prepare(batch.observation))
        valid = torch.from_numpy(np.ascontiguousarray(batch.chunk.valid)).to(self.device)
        return self.head.log_prob(context, self.targets(batch), valid, rng)

    @torch.no_grad()
    def plan(
        self,
        observation: Observation,
        rngs: Sequence[np.random.Generator],
        guide: Guide | None = None,
        *,
        cached: bool = True,
    ) -> Chunk:
        """One chunk per sample in physical units; sample b uses ``rngs[b]`` alone.

        Steps without a decision (tokens that do not decode) are not ``valid``. They hold the action that stands still,
        or NaN where the action's kind does not say how to, so that an executor with nothing to repeat refuses.

        Args:
            guide: what the new chunks have to continue (real-time chunking).
            cached: False recomputes the prefix in every pass of the head; the result is the same up to rounding.

        Raises:
            InputError: what ``prepare`` refuses; a wrong number of generators.
            ConfigError: a guide for a head that is not flow matching.
            NonFiniteError: the network's answer is not a number.
        """
        if len(rngs) != observation.size:
            raise InputError(f"rngs: expected one generator per sample ({observation.size}), got {len(rngs)}")
        context = self.backbone(self.prepare(observation), cached=cached)
        drawn = self._draw(context, observation, rngs, guide)
        normal = drawn.actions.float().cpu().numpy()
        if not np.isfinite(normal).all():
            raise NonFiniteError(
                "plan: expected finite actions, got NaN or infinity. The weights are damaged or diverged."
            )
        actions = self.action_normaliser.decode(normal)
        actions = self.transforms.decode(observation, actions).astype(np.float32)
        valid = np.ones(actions.shape[:2], bool) if drawn.valid is None else drawn.valid.cpu().numpy()
        if not valid.all():
            actions = np.where(valid[..., None], actions, self._still(observation)[:, None])
        return Chunk(actions, valid, None if drawn.malformed is None else drawn.malformed.cpu().numpy())

    def _still(self, observation: Observation) -> Float32[np.ndarray, "B A"]:
        """The action that moves nothing: no displacement or velocity, the present position where the state has it."""
        names, spec = self.spec.state.names, self.spec.action
        still = np.full((observation.size, spec.size), np.nan, np.float32)
        for a, (name, kind) in enumerate(zip(spec.names, spec.kinds, strict=True)):
            if kind in ("delta", "velocity"):
                still[:, a] = 0
            elif kind == "position" and name in names:
                still[:, a] = observation.state[:, -1, names.index(name)]
        return still

    def _draw(
        self,
        context: Context,
        observation: Observation,
        rngs: Sequence[np.random.Generator],
        guide: Guide | None,
    ) -> Drawn:
        if guide is None:
            return self.head.sample(context, rngs)
        if not isinstance(self.head, FlowHead):
            raise ConfigError(
                f"plan: expected a flow-matching head to follow a guide, got {type(self.head).__name__}. Execute with "
                "Receding or Ensemble instead of RealTime."
            )
        actions = self.action_normaliser.encode(self.transforms.encode(observation, guide.actions))
        actions = np.where(guide.weights[..., None] > 0, actions, 0)
        tensors = [torch.from_numpy(np.ascontiguousarray(x)).to(self.device) for x in (actions, guide.weights)]
        delay = torch.from_numpy(guide.delay).to(self.device)
        return self.head.sample(context, rngs, GuideTensors(tensors[0], tensors[1], delay, guide.method, guide.limit))

    def unknown_words(self, instructions: Sequence[str]) -> tuple[str, ...]:
        """Words of these instructions that training never saw: the policy cannot know what they mean."""
        return self.tokenizer.unknown_words(instructions)
