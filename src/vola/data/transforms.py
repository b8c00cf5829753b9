"""Frozen transforms with exact inverses: what happens between physical actions and what a head sees.

A transform never looks at statistics; normalising comes after it and its statistics are bound to its fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from PIL import Image

from vola.errors import ConfigError, InputError, expect_shape
from vola.types import Observation, RobotSpec

Fit = Literal["stretch", "pad"]


def resize_images(images: np.ndarray, height: int, width: int, fit: Fit = "stretch") -> np.ndarray:
    """Resize uint8 ``N C Y X`` to ``N C height width`` with an antialiased triangle filter.

    Integer arithmetic (Pillow's), so the bytes do not depend on threads or processor. Images that already have the
    target size are returned as they are. ``fit="stretch"`` changes the aspect ratio; ``fit="pad"`` keeps it and
    fills the borders with black, centred (openpi's ``resize_with_pad``).

    Raises:
        InputError: not uint8 ``N C Y X``, or a target below one pixel.
    """
    expect_shape("images", images, "N C Y X")
    if images.dtype != np.uint8:
        raise InputError(f"images: expected uint8, got {images.dtype}")
    if height < 1 or width < 1:
        raise InputError(f"resize_images: expected a target of at least 1x1, got {height}x{width}")
    if fit not in ("stretch", "pad"):
        raise InputError(f"fit: expected 'stretch' or 'pad', got {fit!r}")
    N, C, Y, X = images.shape
    if (height, width) == (Y, X):
        return images
    inner_y, inner_x = height, width
    if fit == "pad":
        ratio = max(X / width, Y / height)
        inner_y, inner_x = max(1, int(Y / ratio)), max(1, int(X / ratio))
    top, left = (height - inner_y) // 2, (width - inner_x) // 2
    out = np.zeros((N, C, height, width), np.uint8)
    view = out[:, :, top : top + inner_y, left : left + inner_x]
    for n in range(N):
        if C == 3:
            picture = Image.fromarray(np.ascontiguousarray(images[n].transpose(1, 2, 0)))
            small = np.asarray(picture.resize((inner_x, inner_y), Image.Resampling.BILINEAR))
            view[n] = small.transpose(2, 0, 1)
            continue
        for c in range(C):
            picture = Image.fromarray(np.ascontiguousarray(images[n, c]))
            view[n, c] = np.asarray(picture.resize((inner_x, inner_y), Image.Resampling.BILINEAR))
    return out


@dataclass(frozen=True)
class RelativeActions:
    """Actions as offsets from where the robot is now: on the chosen dimensions ``action_h - state_now``.

    ``pairs`` holds (action dimension, state dimension). Every h of a chunk is relative to the *same* state, the
    last of the window, as in openpi's DeltaActions. Leave grippers out.

    Raises:
        ConfigError: no pair, a negative dimension, or an action dimension twice.
    """

    pairs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        targets = [a for a, _ in self.pairs]
        if not self.pairs or len(set(targets)) != len(targets) or any(d < 0 for pair in self.pairs for d in pair):
            raise ConfigError(
                f"RelativeActions: expected pairs (action dimension, state dimension), each action dimension once "
                f"and none negative, got {self.pairs}"
            )

    @staticmethod
    def by_name(spec: RobotSpec, names: Sequence[str] | None = None) -> RelativeActions:
        """Pair action and state dimensions of equal name; ``names`` limits them (default: all but grippers).

        Raises:
            ConfigError: a name that the state or the action does not have, or no common name.
        """
        kinds = dict(zip(spec.action.names, spec.action.kinds, strict=True))
        chosen = names if names is not None else [n for n in spec.action.names if kinds[n] != "gripper"]
        common = [n for n in chosen if n in spec.action.names and n in spec.state.names]
        missing = sorted(set(chosen) - set(common)) if names is not None else []
        if missing or not common:
            raise ConfigError(
                f"RelativeActions.by_name: expected names that state {spec.state.names} and action "
                f"{spec.action.names} share, got {missing or 'no common name'}"
            )
        return RelativeActions(tuple((spec.action.names.index(n), spec.state.names.index(n)) for n in common))

    def encode(self, observation: Observation, actions: np.ndarray) -> np.ndarray:
        """Physical actions ``B H A`` -> relative ones."""
        return self._shift(observation, actions, -1)

    def decode(self, observation: Observation, actions: np.ndarray) -> np.ndarray:
        """The inverse of ``encode`` for the same observation, exact up to float rounding."""
        return self._shift(observation, actions, 1)

    def _shift(self, observation: Observation, actions: np.ndarray, sign: int) -> np.ndarray:
        sizes = expect_shape("actions", actions, "B H A", B=observation.size)
        targets, sources = (np.array(d) for d in zip(*self.pairs, strict=True))
        if targets.max() >= sizes["A"] or sources.max() >= observation.state.shape[-1]:
            raise InputError(
                f"RelativeActions: the pairs {self.pairs} do not fit A={sizes['A']}, S={observation.state.shape[-1]}"
            )
        out = np.array(actions, copy=True)
        out[:, :, targets] += sign * observation.state[:, -1][:, sources][:, None]
        return out


@dataclass(frozen=True)
class Transforms:
    """Steps applied in order by ``encode`` and undone in reverse by ``decode``; the empty tuple changes nothing."""

    steps: tuple[RelativeActions, ...] = ()

    def encode(self, observation: Observation, actions: np.ndarray) -> np.ndarray:
        """Physical actions ``B H A`` -> what is normalised and learnt."""
        for step in self.steps:
            actions = step.encode(observation, actions)
        return actions

    def decode(self, observation: Observation, actions: np.ndarray) -> np.ndarray:
        """The inverse, for the observation that the actions were planned from."""
        for step in reversed(self.steps):
            actions = step.decode(observation, actions)
        return actions

    def fingerprint(self) -> str:
        """Identity of the representation; statistics carry it (``absolute`` when nothing is changed)."""
        if not self.steps:
            return "absolute"
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()[:16]

    def to_json(self) -> list[dict[str, Any]]:
        """Plain lists and numbers, in order."""
        return [{"kind": "relative_actions", "pairs": [list(p) for p in s.pairs]} for s in self.steps]

    @staticmethod
    def from_json(data: Sequence[Mapping[str, Any]]) -> Transforms:
        """The inverse of ``to_json``; raises ConfigError on an unknown kind."""
        steps = []
        for entry in data:
            if entry.get("kind") != "relative_actions":
                raise ConfigError(f"transforms: expected the kind 'relative_actions', got {entry.get('kind')!r}")
            steps.append(RelativeActions(tuple((int(a), int(s)) for a, s in entry["pairs"])))
        return Transforms(tuple(steps))
