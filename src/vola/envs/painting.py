"""Painting flat shapes into many small pictures at once: antialiased, with a soft shadow, any size.

A shape is a signed distance function (negative inside, metres), so the same scene can be painted at 48 pixels for a
policy and at 256 for a person. Only a bounding box around each shape is touched, which is what makes painting cheap
enough to stand in an inner loop; outside its box a shape has opacity zero, so the result is the same as painting
it over the whole picture (``whole=True``, the reference used by the tests).

The picture shows the table [-1, 1]^2 seen from above, x to the right, y up: row 0 is y = +1.
Arithmetic is element by element, so what is painted for one scene does not depend on the other scenes of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, UInt8

from vola.errors import InputError

BACKGROUND = 240  # the value of an empty table in every channel
SHADOW_OFFSET = (0.010, -0.014)  # m
SHADOW_BLUR = 0.030  # m, distance over which the shadow fades
SHADOW_OPACITY = 0.22
SHADOW_COLOUR = (70.0, 74.0, 92.0)


@dataclass(frozen=True)
class Disc:
    """A filled circle of ``radius`` (m)."""

    radius: float

    @property
    def reach(self) -> tuple[float, float]:
        """Half extents in x and y (m)."""
        return self.radius, self.radius

    def distance(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Signed distance (m) at x, y relative to the centre."""
        return np.sqrt(x * x + y * y) - np.float32(self.radius)


@dataclass(frozen=True)
class Ring:
    """A circle line: outer ``radius`` and ``thickness`` (m)."""

    radius: float
    thickness: float

    @property
    def reach(self) -> tuple[float, float]:
        """Half extents in x and y (m)."""
        return self.radius, self.radius

    def distance(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Signed distance (m) at x, y relative to the centre."""
        half = np.float32(self.thickness / 2)
        return np.abs(np.sqrt(x * x + y * y) - np.float32(self.radius) + half) - half


@dataclass(frozen=True)
class Box:
    """A rectangle with half extents ``half`` (m) and corners rounded by ``corner`` (m)."""

    half: tuple[float, float]
    corner: float = 0.0

    @property
    def reach(self) -> tuple[float, float]:
        """Half extents in x and y (m)."""
        return self.half

    def distance(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Signed distance (m) at x, y relative to the centre."""
        corner = np.float32(self.corner)
        u = np.abs(x) - np.float32(self.half[0]) + corner
        v = np.abs(y) - np.float32(self.half[1]) + corner
        zero = np.float32(0)
        outside = np.sqrt(np.maximum(u, zero) ** 2 + np.maximum(v, zero) ** 2)
        return outside + np.minimum(np.maximum(u, v), zero) - corner


@dataclass(frozen=True)
class Cross:
    """A plus sign: arms reach ``radius`` from the centre and are ``thickness`` wide (m)."""

    radius: float
    thickness: float

    @property
    def reach(self) -> tuple[float, float]:
        """Half extents in x and y (m)."""
        return self.radius, self.radius

    def distance(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Signed distance (m) at x, y relative to the centre."""
        half, corner = self.thickness / 2, self.thickness / 5
        return np.minimum(
            Box((self.radius, half), corner).distance(x, y), Box((half, self.radius), corner).distance(x, y)
        )


Shape = Disc | Ring | Box | Cross


@dataclass(frozen=True)
class Sprite:
    """One shape in the pictures ``rows``, with a centre (m) and a colour (0..255) of its own in each of them.

    ``shadow`` is for things that stand on the table; decorations on top of another sprite go without.
    """

    shape: Shape
    rows: Int[np.ndarray, " m"]
    centre: Float[np.ndarray, "m 2"]
    colour: Float[np.ndarray, "m 3"]
    shadow: bool = True


def paint(sprites: Sequence[Sprite], n: int, size: int, *, whole: bool = False) -> UInt8[np.ndarray, "n Y X 3"]:
    """Pictures of n scenes, ``size`` pixels square, sprites painted in order (later ones on top).

    whole: evaluate every shape on the whole picture instead of its bounding box; slow, the same result.

    Raises:
        InputError: ``size`` is below 8 pixels.
    """
    if size < 8:
        raise InputError(f"size: expected at least 8 pixels, got {size}")
    pixel = 2.0 / size
    boxes = [_box(s, pixel, size if whole else 0) for s in sprites]
    pad = max((max(box) for box in boxes), default=0) + 1
    side = size + 2 * pad  # a frame around the picture, so that no box has to be cut at the edge
    canvas = np.full((n, side, side, 3), BACKGROUND, np.uint8)
    for sprite, box in zip(sprites, boxes, strict=True):
        if len(sprite.rows):
            _blend(canvas, sprite, box, pad, pixel)
    return np.ascontiguousarray(canvas[:, pad : pad + size, pad : pad + size])


def _box(sprite: Sprite, pixel: float, least: int) -> tuple[int, int]:
    """Half width and half height in pixels of the box that holds every pixel the sprite touches."""
    margin = pixel + (SHADOW_BLUR + max(map(abs, SHADOW_OFFSET)) if sprite.shadow else 0.0)
    width, height = (max(least, math.ceil((r + margin) / pixel)) for r in sprite.shape.reach)
    return width, height


def _blend(canvas: np.ndarray, sprite: Sprite, box: tuple[int, int], pad: int, pixel: float) -> None:
    """Paint one sprite onto the padded canvas, in place."""
    side = canvas.shape[1]
    size = side - 2 * pad
    column = (sprite.centre[:, 0] + 1.0) / pixel  # of the centre; pixel i spans [i, i + 1)
    row = (1.0 - sprite.centre[:, 1]) / pixel
    # A centre off the table is painted at the edge of the frame and cut off with it.
    columns = np.clip(np.floor(column).astype(np.int64), 0, size - 1)[:, None] + np.arange(-box[0], box[0] + 1)
    rows = np.clip(np.floor(row).astype(np.int64), 0, size - 1)[:, None] + np.arange(-box[1], box[1] + 1)
    x = ((columns + 0.5 - column[:, None]) * pixel).astype(np.float32)[:, None, :]
    y = ((row[:, None] - rows - 0.5) * pixel).astype(np.float32)[:, :, None]
    fill = np.clip(np.float32(0.5) - sprite.shape.distance(x, y) * np.float32(1 / pixel), 0, 1)[..., None]
    flat = canvas.reshape(-1, 3)
    index = ((sprite.rows[:, None, None] * side + rows[:, :, None] + pad) * side) + columns[:, None, :] + pad
    base = flat[index].astype(np.float32)
    if sprite.shadow:
        away = sprite.shape.distance(x - np.float32(SHADOW_OFFSET[0]), y - np.float32(SHADOW_OFFSET[1]))
        shade = np.clip(np.float32(0.5) - away * np.float32(0.5 / SHADOW_BLUR), 0, 1)[..., None]
        base += (np.asarray(SHADOW_COLOUR, np.float32) - base) * (shade * np.float32(SHADOW_OPACITY))
    base += (sprite.colour.astype(np.float32)[:, None, None, :] - base) * fill
    flat[index] = np.rint(base).astype(np.uint8)
