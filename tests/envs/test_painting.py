"""Painting: right place, right colour, and the bounding boxes change nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vola.envs.painting import BACKGROUND, Box, Cross, Disc, Ring, Sprite, paint
from vola.errors import InputError

SHAPES = (Disc(0.1), Ring(0.2, 0.05), Box((0.3, 0.1), 0.02), Cross(0.13, 0.07))


def one(shape, x, y, shadow=False, n=1):
    return Sprite(shape, np.arange(n), np.full((n, 2), (x, y)), np.full((n, 3), (200.0, 100.0, 0.0)), shadow)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([16, 33, 48]))
def test_bounding_boxes_equal_the_whole_picture(seed, size):
    rng = np.random.default_rng(seed)
    sprites = []
    for shape in SHAPES:
        rows = np.flatnonzero(rng.random(5) < 0.7)
        centre, colour = rng.uniform(-1.05, 1.05, (len(rows), 2)), rng.uniform(0, 255, (len(rows), 3))
        sprites.append(Sprite(shape, rows, centre, colour, bool(rng.integers(2))))
    np.testing.assert_array_equal(paint(sprites, 5, size), paint(sprites, 5, size, whole=True))


def test_x_goes_right_and_y_goes_up():
    picture = paint([one(Disc(0.1), 0.5, 0.75)], 1, 64)[0]
    rows, columns = np.nonzero((picture != BACKGROUND).any(axis=2))
    assert columns.mean() + 0.5 == pytest.approx(64 * 0.75, abs=0.1)
    assert rows.mean() + 0.5 == pytest.approx(64 * 0.125, abs=0.1)


@pytest.mark.parametrize(
    ("shape", "area"),
    [
        (Disc(0.2), np.pi * 0.04),
        (Ring(0.3, 0.1), np.pi * (0.09 - 0.04)),
        (Box((0.4, 0.2)), 0.32),
        (Cross(0.3, 0.1), 0.11),
    ],
)
def test_opacity_integrates_to_the_area_of_the_shape(shape, area):
    """Antialiasing must neither swell nor shrink a shape: summed opacity x pixel area = area, wherever it lies."""
    for x in (0.0, 0.013):
        red = paint([one(shape, x, 0.0)], 1, 128)[0][..., 2].astype(float)  # 240 outside, 0 inside
        covered = ((BACKGROUND - red) / BACKGROUND).sum() * (2 / 128) ** 2
        assert covered == pytest.approx(area, rel=0.03)


def test_only_the_named_rows_are_painted_and_later_sprites_lie_on_top():
    below, above = one(Disc(0.3), 0, 0, n=1), one(Disc(0.1), 0, 0, n=1)
    above = Sprite(above.shape, above.rows, above.centre, np.array([[1.0, 2.0, 3.0]]), False)
    pictures = paint([below, above], 2, 33)
    assert (pictures[1] == BACKGROUND).all()
    assert pictures[0, 16, 16].tolist() == [1, 2, 3]
    assert pictures[0, 16, 19].tolist() == [200, 100, 0]


def test_a_shadow_darkens_beside_the_shape_only():
    plain, shaded = paint([one(Disc(0.2), 0, 0)], 1, 64)[0], paint([one(Disc(0.2), 0, 0, shadow=True)], 1, 64)[0]
    assert (shaded <= plain).all()
    assert (shaded < plain).any()
    assert shaded[32, 32].tolist() == [200, 100, 0]
    assert shaded[0, 0].tolist() == [BACKGROUND] * 3


def test_tiny_pictures_are_refused():
    with pytest.raises(InputError, match="at least 8"):
        paint([], 1, 4)
