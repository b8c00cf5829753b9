"""Pictures of a report as data addresses: rollouts as animated WebP, fans of sampled chunks as SVG over a picture."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vola.report.records import Clip, Fan

DEFAULT_RATE = 10.0  # frames per second where a clip does not say
LAST_FRAME_MS = 1200  # the end is what a reader wants to see
MOST_FRAMES = 80
CHANGED = 24  # of 255: by how much a pixel must differ from the background to belong to something that moves
MOST_CHANGED = 0.4  # share of the picture that moving things may cover; above it the camera moves and nothing is traced
TRAIL = 0.35  # strength of the trace of what has moved
# (largest side in pixels, quality) tried in turn until all clips fit into the budget.
SIZES = ((256, 82), (224, 70), (176, 60), (128, 50))


@dataclass(frozen=True)
class Movie:
    """A clip ready for the page: ``animated`` and ``still`` (its last frame) as data addresses, sizes in pixels;
    ``trail``: whether both show where things have been."""

    animated: str
    still: str
    width: int
    height: int
    shown: int
    bytes: int
    trail: bool


def movies(clips: Sequence[Clip], budget: int) -> tuple[list[Movie], int]:
    """As many clips as fit into ``budget`` bytes at the largest size at which all fit; and how many were left out."""
    for side, quality in SIZES:
        made = [movie(clip, side, quality) for clip in clips]
        if sum(m.bytes for m in made) <= budget:
            return made, 0
    kept: list[Movie] = []
    for one in made:
        if sum(m.bytes for m in kept) + one.bytes > budget:
            break
        kept.append(one)
    return kept, len(clips) - len(kept)


def movie(clip: Clip, side: int, quality: int) -> Movie:
    """One clip as an endless animated WebP of at most ``side`` pixels and MOST_FRAMES frames (first and last kept)."""
    length = len(clip.frames)
    chosen = np.unique(np.linspace(0, length - 1, min(length, MOST_FRAMES)).round().astype(int))
    frames, trail = with_trail(np.stack([np.asarray(_scaled(clip.frames[i], side)) for i in chosen]))
    pictures = [Image.fromarray(frame) for frame in frames]
    per_frame = 1000 / (clip.rate or DEFAULT_RATE) * length / len(chosen)
    durations = [max(20, round(per_frame))] * (len(pictures) - 1) + [LAST_FRAME_MS]
    buffer = io.BytesIO()
    pictures[0].save(
        buffer, "WEBP", save_all=True, append_images=pictures[1:], duration=durations, loop=0, quality=quality, method=4
    )
    animated, still = buffer.getvalue(), _webp(pictures[-1], quality)
    size = len(animated) + len(still)
    return Movie(_address(animated), _address(still), *pictures[0].size, len(chosen), size, trail)


def with_trail(frames: np.ndarray) -> tuple[np.ndarray, bool]:
    """Frames uint8 ``L Y X 3`` of a camera that stands still, with a pale trace where something has been; and whether
    there is one. Frames of a moving camera come back as they are.

    The background is the median over the frames, each standstill counted once; a pixel's trace is the value at which
    it has differed most from the background so far.
    """
    still = np.abs(np.diff(frames.astype(np.int16), axis=0)).max(axis=(1, 2, 3)) <= CHANGED
    background = np.median(frames[np.concatenate([[True], ~still])], axis=0)
    moved = np.abs(frames - background).max(axis=3)
    if not 0 < (moved > CHANGED).any(axis=0).mean() <= MOST_CHANGED:
        return frames, False
    shown, trace, most = frames.copy(), frames[0].astype(np.float64), moved[0].copy()
    for t in range(1, len(frames)):
        pale = (most > CHANGED) & (moved[t] <= CHANGED)
        shown[t][pale] = np.round((1 - TRAIL) * frames[t][pale] + TRAIL * trace[pale])
        stronger = moved[t] > most
        trace[stronger], most[stronger] = frames[t][stronger], moved[t][stronger]
    return shown, True


def still(image: np.ndarray, quality: int = 90) -> str:
    """A picture uint8 ``Y X 3`` as a data address."""
    return _address(_webp(Image.fromarray(np.ascontiguousarray(image)), quality))


def paths(fan: Fan) -> list[str]:
    """The n chunks of a fan as SVG path data, in pixels of its picture, to a tenth of a pixel."""
    rounded = np.round(fan.paths.astype(np.float64), 1)
    return ["M" + "L".join(f"{x:g} {y:g}" for x, y in path) for path in rounded]


def spread(fan: Fan) -> float:
    """How far the chunks lie apart at the step where they differ most, as a share of the picture's width: root mean
    square distance of the n points to their mean."""
    points = fan.paths.astype(np.float64)
    apart = np.sqrt(((points - points.mean(axis=0)) ** 2).sum(axis=2).mean(axis=0))
    return float(apart.max() / fan.image.shape[1])


def _scaled(frame: np.ndarray, side: int) -> Image.Image:
    picture = Image.fromarray(np.ascontiguousarray(frame))
    largest = max(picture.size)
    if largest <= side:
        return picture
    width, height = (max(1, round(v * side / largest)) for v in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def _webp(picture: Image.Image, quality: int) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=quality, method=4)
    return buffer.getvalue()


def _address(content: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(content).decode("ascii")
