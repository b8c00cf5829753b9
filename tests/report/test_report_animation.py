"""Clips and fans as they come out of the page."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from vola.report.animation import LAST_FRAME_MS, MOST_FRAMES, TRAIL, movie, movies, paths, spread, with_trail
from vola.report.records import Clip, Fan


def clip(length: int, side: int, rate: float | None = None) -> Clip:
    levels = np.linspace(0, 255, length).astype(np.uint8)
    frames = np.broadcast_to(levels[:, None, None, None], (length, side, side, 3)).copy()
    return Clip(frames, "pi0", "go", True, "", rate)


def opened(address: str) -> Image.Image:
    assert address.startswith("data:image/webp;base64,")
    return Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))


def frames_of(image: Image.Image) -> tuple[list[float], list[int]]:
    levels, durations = [], []
    for i in range(image.n_frames):
        image.seek(i)
        image.load()
        levels.append(float(np.asarray(image.convert("RGB")).mean()))
        durations.append(image.info["duration"])
    return levels, durations


def test_a_movie_plays_all_frames_at_its_rate_and_rests_on_the_last() -> None:
    made = movie(clip(12, 48, rate=20.0), side=256, quality=90)
    levels, durations = frames_of(opened(made.animated))
    assert levels == pytest.approx(np.linspace(0, 255, 12).astype(int), abs=4)
    assert durations == [50] * 11 + [LAST_FRAME_MS]
    assert (made.width, made.height) == (48, 48)
    assert np.asarray(opened(made.still).convert("RGB")).mean() == pytest.approx(255, abs=4)


def test_a_long_movie_is_thinned_without_changing_its_speed() -> None:
    made = movie(clip(400, 16, rate=20.0), side=256, quality=60)
    levels, durations = frames_of(opened(made.animated))
    assert made.shown == MOST_FRAMES
    assert sum(durations[:-1]) == pytest.approx(400 / 20 * 1000, rel=0.03)
    assert (levels[0], levels[-1]) == pytest.approx((0, 255), abs=8)


def test_one_frame_is_a_movie_too() -> None:
    assert opened(movie(clip(1, 16), 256, 80).animated).size == (16, 16)


def walk(places: list[int]) -> np.ndarray:
    """A black 4 x 4 robot on white that stands at x = 4 p in frame p of ``places``."""
    frames = np.full((len(places), 16, 40, 3), 240, np.uint8)
    for frame, place in zip(frames, places, strict=True):
        frame[4:8, 4 * place : 4 * place + 4] = 20
    return frames


def test_a_pale_trace_shows_where_something_has_been_and_nothing_else_changes() -> None:
    frames = walk([0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4])  # most of the time it stands still, as against a wall
    shown, trail = with_trail(frames)
    assert trail
    assert np.array_equal(shown[0], frames[0])
    pale = round((1 - TRAIL) * 240 + TRAIL * 20)
    for t in (1, 2, 5, 11):
        been = (frames[:t] == 20).any(axis=0) & (frames[t] != 20)
        assert (shown[t][been] == pale).all()
        assert np.array_equal(shown[t][~been], frames[t][~been])


def test_no_trace_without_movement_or_with_a_moving_camera() -> None:
    rng = np.random.default_rng(0)
    for frames in (walk([2, 2, 2]), walk([1]), rng.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)):
        shown, trail = with_trail(frames)
        assert not trail
        assert shown is frames


def test_large_clips_shrink_before_any_is_dropped() -> None:
    noisy = np.random.default_rng(0).integers(0, 256, (3, 320, 240, 3), dtype=np.uint8)
    clips = [Clip(noisy, "pi0", "go", True, "", None)] * 2
    large, dropped = movies(clips, budget=10_000_000)
    assert (large[0].height, large[0].width, dropped) == (256, 192, 0)
    small, dropped = movies(clips, budget=2 * large[0].bytes - 1)
    assert small[0].height < 256
    assert dropped == 0


def test_fan_paths_and_spread() -> None:
    image = np.zeros((8, 8, 3), np.uint8)
    two = np.array([[[0, 0], [3, 4.04]], [[0, 0], [3, -4]]], np.float32)
    fan = Fan("0", "pi0", image, two, "go")
    assert paths(fan) == ["M0 0L3 4", "M0 0L3 -4"]
    assert spread(fan) == pytest.approx(4.02 / 8)
    assert spread(Fan("0", "L2", image, two[:1], "go")) == 0
