"""Noise schedules of diffusion and the two steps that undo them, as pure functions.

    x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise,      abar_t = product of (1 - beta_i) for i <= t

t = 0 .. train_steps - 1 counts noise: the largest t is the noisiest (the way of the diffusion papers; a network is
told tau = 1 - t / train_steps, see ``vola.heads.diffusion``). Everything agrees with diffusers 0.39 with "leading"
spacing, no offset and set_alpha_to_one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Float, Float64
from torch import Tensor

Schedule: TypeAlias = Literal["cosine", "linear"]
Prediction: TypeAlias = Literal["epsilon", "sample", "v"]
Variance: TypeAlias = Literal["small", "large"]
Spacing: TypeAlias = Literal["leading", "trailing"]


def betas(schedule: Schedule, train_steps: int) -> Float64[np.ndarray, " K"]:
    """Noise added by each of the K training steps.

    "cosine": 1 - f(t + 1) / f(t), at most 0.999, f(t) = cos^2((t / K + 0.008) / 1.008 pi / 2) (Nichol & Dhariwal
    2021, eq. 17; diffusers' squaredcos_cap_v2). "linear": from 1e-4 to 0.02, made for K = 1000 (Ho et al. 2020).
    """
    if schedule == "linear":
        return np.linspace(1e-4, 0.02, train_steps)
    f = np.cos((np.arange(train_steps + 1) / train_steps + 0.008) / 1.008 * math.pi / 2) ** 2
    return np.minimum(1 - f[1:] / f[:-1], 0.999)


def alphas_bar(schedule: Schedule, train_steps: int) -> Float64[np.ndarray, " K"]:
    """How much of the data's variance is left at each t."""
    return np.cumprod(1 - betas(schedule, train_steps))


@dataclass(frozen=True)
class Level:
    """One denoising step: from time t with ``here`` = abar_t to the next visited time with ``there``; 1 after the
    last, which is clean."""

    t: int
    here: float
    there: float


def levels(schedule: Schedule, train_steps: int, steps: int, spacing: Spacing = "leading") -> tuple[Level, ...]:
    """The ``steps`` <= train_steps levels that a sampler visits, noisiest first.

    "leading": every floor(train_steps / steps)-th t down to 0; the first is below the noisiest one, and x starts as
    pure noise all the same (with 2 of 100 at t = 50). "trailing": from the noisiest down, t = round(train_steps (1 -
    i / steps)) - 1. Source: Lin et al. 2024 (arXiv 2305.08891), table 2.
    """
    bars = alphas_bar(schedule, train_steps)
    stride = train_steps // steps
    if spacing == "leading":
        times = list(range((steps - 1) * stride, -1, -stride))
    else:
        times = [round(train_steps * (1 - i / steps)) - 1 for i in range(steps)]
    after = [*(float(bars[t]) for t in times[1:]), 1.0]
    return tuple(Level(t, float(bars[t]), there) for t, there in zip(times, after, strict=True))


def add_noise(clean: Float[Tensor, "B H A"], noise: Float[Tensor, "B H A"], bar: Tensor) -> Float[Tensor, "B H A"]:
    """x_t for abar_t ``bar`` (broadcasts)."""
    return bar.sqrt() * clean + (1 - bar).sqrt() * noise


def target(
    clean: Float[Tensor, "B H A"], noise: Float[Tensor, "B H A"], bar: Tensor, prediction: Prediction
) -> Float[Tensor, "B H A"]:
    """What the network is asked for: the noise, the data, or v = sqrt(abar) noise - sqrt(1 - abar) data.

    Source of v: Salimans & Ho 2022 (arXiv 2202.00512), appendix D.
    """
    if prediction == "epsilon":
        return noise
    return clean if prediction == "sample" else bar.sqrt() * noise - (1 - bar).sqrt() * clean


def split(
    x: Float[Tensor, "B H A"], answer: Float[Tensor, "B H A"], bar: float, prediction: Prediction
) -> tuple[Float[Tensor, "B H A"], Float[Tensor, "B H A"]]:
    """The data and the noise that ``answer`` takes x_t apart into."""
    signal, noise = math.sqrt(bar), math.sqrt(1 - bar)
    if prediction == "epsilon":
        return (x - noise * answer) / signal, answer
    if prediction == "sample":
        return answer, (x - signal * answer) / noise
    return signal * x - noise * answer, signal * answer + noise * x


def limit(x: Float[Tensor, "B H A"], size: float) -> Float[Tensor, "B H A"]:
    """x held in [-size, size]; 0 for no limit."""
    return x.clamp(-size, size) if size else x


def ddpm_step(
    x: Float[Tensor, "B H A"],
    answer: Float[Tensor, "B H A"],
    level: Level,
    prediction: Prediction,
    clip: float,
    noise: Float[Tensor, "B H A"] | None,
    variance: Variance = "small",
) -> Float[Tensor, "B H A"]:
    """One ancestral step; ``noise`` None for the last one.

    The mean is that of q(x_there | x_here, clean) with the clean estimate in [-clip, clip]. With beta = 1 - here /
    there, the variance is "small": (1 - there) / (1 - here) beta, or "large": beta. Source: Ho et al. 2020 (arXiv
    2006.11239), eq. 7.
    """
    clean = limit(split(x, answer, level.here, prediction)[0], clip)
    alpha = level.here / level.there
    toward = math.sqrt(level.there) * (1 - alpha) / (1 - level.here)
    stay = math.sqrt(alpha) * (1 - level.there) / (1 - level.here)
    mean = toward * clean + stay * x
    if noise is None:
        return mean
    shrink = (1 - level.there) / (1 - level.here) if variance == "small" else 1.0
    return mean + math.sqrt(shrink * (1 - alpha)) * noise


def ddim_step(
    x: Float[Tensor, "B H A"],
    answer: Float[Tensor, "B H A"],
    level: Level,
    prediction: Prediction,
    clip: float,
    noise: Float[Tensor, "B H A"] | None,
    eta: float = 0.0,
) -> Float[Tensor, "B H A"]:
    """One step of DDIM: deterministic for eta = 0, as random as DDPM's "small" variance for eta = 1.

    The clean estimate is held in [-clip, clip], the noise estimate stays as the network gave it (diffusers). ``noise``
    may be None for eta = 0 and for the last step. Source: Song et al. 2021 (arXiv 2010.02502), eq. 12 and 16.
    """
    clean, direction = split(x, answer, level.here, prediction)
    deviation = eta * math.sqrt((1 - level.there) / (1 - level.here) * (1 - level.here / level.there))
    moved = math.sqrt(level.there) * limit(clean, clip) + math.sqrt(1 - level.there - deviation**2) * direction
    return moved if noise is None else moved + deviation * noise
