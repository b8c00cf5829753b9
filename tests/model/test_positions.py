"""Positions: rotary scores see distances only, codes are their formulas, and the conventions are the published ones."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vola.errors import ConfigError
from vola.model.positions import rotary_angles, rotate, sinusoidal, time_code

place = st.integers(0, 2000)


def turned(x: torch.Tensor, position: int, base: float = 1e4) -> torch.Tensor:
    angles = rotary_angles(torch.tensor([[position]]), x.shape[-1], base)
    return rotate(x[None, None, None], angles)[0, 0, 0]


@given(place, place, st.integers(0, 500), st.sampled_from([100.0, 1e4, 5e5]))
@settings(max_examples=60, deadline=None)
def test_rotary_scores_depend_on_the_distance_only(n: int, m: int, shift: int, base: float) -> None:
    rng = torch.Generator().manual_seed(n + m)
    q, k = torch.randn(2, 16, generator=rng)
    here = turned(q, n, base) @ turned(k, m, base)
    there = turned(q, n + shift, base) @ turned(k, m + shift, base)
    torch.testing.assert_close(here, there, atol=2e-3, rtol=0)  # angles of thousands of radians in float32


def test_rotary_scores_do_depend_on_the_distance() -> None:
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    scores = torch.stack([turned(q, n) @ turned(k, 0) for n in range(20)])
    assert scores.std() > 0.5


@given(place, st.sampled_from([2, 4, 6, 64]))
@settings(max_examples=40, deadline=None)
def test_rotation_keeps_norms_pair_by_pair(n: int, d: int) -> None:
    x = torch.randn(d, generator=torch.Generator().manual_seed(d))
    y = turned(x, n)
    first, second = x.chunk(2), y.chunk(2)
    torch.testing.assert_close(second[0] ** 2 + second[1] ** 2, first[0] ** 2 + first[1] ** 2)


@given(place, place)
@settings(max_examples=40, deadline=None)
def test_rotations_add_up_and_zero_is_identity(n: int, m: int) -> None:
    x = torch.randn(8, generator=torch.Generator().manual_seed(n))
    torch.testing.assert_close(turned(turned(x, n), m), turned(x, n + m), atol=1e-3, rtol=0)
    assert torch.equal(turned(x, 0), x)


def test_pairs_are_half_split() -> None:
    """Gemma and Llama pair (i, i + d/2), and pair i turns by position * base^(-2i/d), counter-clockwise."""
    d, position, base = 6, 5, 100.0
    for i in range(3):
        x = torch.zeros(d)
        x[i] = 1.0
        angle = position * base ** (-2 * i / d)
        expected = torch.zeros(d)
        expected[i], expected[i + 3] = math.cos(angle), math.sin(angle)
        torch.testing.assert_close(turned(x, position, base), expected)


def test_rotation_keeps_the_dtype_and_each_sample_has_its_own_positions() -> None:
    position = torch.tensor([[0, 1, 1, 2], [3, 4, 5, 6]])
    angles = rotary_angles(position, 4, 1e4)
    assert angles[0].shape == (2, 1, 4, 2)
    x = torch.randn(2, 3, 4, 4)
    out = rotate(x, angles)
    assert rotate(x.bfloat16(), angles).dtype is torch.bfloat16
    for b in range(2):
        for n in range(4):
            for h in range(3):
                torch.testing.assert_close(out[b, h, n], turned(x[b, h, n], int(position[b, n])))


@pytest.mark.parametrize("base", [100.0, 1e4])
def test_sinusoidal_is_the_formula(base: float) -> None:
    width = 8
    position = torch.tensor([[0.0, 1.0, 2.5], [7.0, 100.0, -3.0]])
    expected = np.zeros((2, 3, width))
    for b in range(2):
        for n in range(3):
            for i in range(width // 2):
                angle = float(position[b, n]) / base ** (2 * i / width)
                expected[b, n, i], expected[b, n, width // 2 + i] = math.sin(angle), math.cos(angle)
    np.testing.assert_allclose(sinusoidal(position, width, base).numpy(), expected, atol=1e-5)


def test_sinusoidal_code_of_a_shift_is_a_fixed_linear_map() -> None:
    """Vaswani et al.: code(p + k) is linear in code(p), by a matrix that depends on k only."""
    codes = sinusoidal(torch.arange(40.0), 8, base=50.0).double()
    for k in (1, 5):
        before, after = codes[: 40 - k], codes[k:]
        solution = torch.linalg.lstsq(before, after).solution
        torch.testing.assert_close(before @ solution, after, atol=1e-4, rtol=0)


def openpi_time_code(t: float, width: int) -> np.ndarray:
    """Sines then cosines of 2 pi t / period, periods geometric from 4e-3 to 4, in doubles."""
    n = width // 2
    period = [4e-3 * (4.0 / 4e-3) ** (i / (n - 1)) for i in range(n)]
    angle = [2 * math.pi * t / p for p in period]
    return np.array([math.sin(a) for a in angle] + [math.cos(a) for a in angle])


@pytest.mark.parametrize("width", [4, 32, 1024])
def test_time_code_is_that_of_openpi(width: int) -> None:
    tau = torch.tensor([0.0, 0.001, 0.1, 0.5, 0.9, 1.0])
    expected = np.stack([openpi_time_code(t, width) for t in tau.double().tolist()])
    np.testing.assert_allclose(time_code(tau, width).numpy(), expected, atol=3e-4)  # 1570 radians in float32


def test_time_code_has_the_published_numbers() -> None:
    code = time_code(torch.tensor([0.5, 0.1]), 1024)
    sines, cosines = code[:, [0, 1, 256, 511]].numpy(), code[:, [512, 513, 768, 1023]].numpy()
    expected_sines = [[0, 0.900485, -0.447149, 0.707107], [0, -0.858563, -0.975581, 0.156434]]
    expected_cosines = [[1, -0.434887, 0.894459, 0.707107], [1, -0.512708, 0.219639, 0.987688]]
    np.testing.assert_allclose(sines, expected_sines, atol=3e-4)
    np.testing.assert_allclose(cosines, expected_cosines, atol=3e-4)


def test_time_code_tells_times_apart() -> None:
    codes = time_code(torch.linspace(0, 1, 101), 64)
    assert (torch.cdist(codes, codes) + 10 * torch.eye(101)).min() > 0.3


@pytest.mark.parametrize("width", [3, 7])
def test_odd_width_is_refused(width: int) -> None:
    for make in (lambda: sinusoidal(torch.arange(3), width), lambda: time_code(torch.zeros(3), width)):
        with pytest.raises(ConfigError, match=f"even width.* got {width}"):
            make()
