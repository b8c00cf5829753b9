"""Diffusion: golden schedules and steps of diffusers, exact networks land on the data, clipping is what it says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from head_tools import Mlp, Oracle, Recorder, check_invalid_steps_do_nothing, fake_context, fit
from safetensors.torch import load_file
from torch import Tensor

from tools import rngs
from vola.errors import ConfigError
from vola.heads.diffusion import Diffusion, DiffusionHead
from vola.heads.schedules import (
    Level,
    Prediction,
    Spacing,
    add_noise,
    alphas_bar,
    betas,
    ddim_step,
    ddpm_step,
    levels,
    split,
    target,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "diffusion_schedulers"
PREDICTIONS: tuple[Prediction, ...] = ("epsilon", "sample", "v")
NAMES: dict[str, Prediction] = {"epsilon": "epsilon", "sample": "sample", "v_prediction": "v"}
POINT = torch.tensor([[0.5, -0.25], [0.9, 0.1], [-0.7, 0.3]])


@pytest.fixture(scope="module")
def io() -> dict[str, Tensor]:
    return load_file(GOLDEN / "io.safetensors")


SPEC = json.loads((GOLDEN / "spec.json").read_text())


def close(found: Tensor, io: dict[str, Tensor], name: str) -> None:
    tolerance = SPEC["tensors"][name]
    torch.testing.assert_close(found.float(), io[name], atol=tolerance["atol"], rtol=tolerance["rtol"])


def exact(config: Diffusion, clean: Tensor) -> Oracle:
    """The perfect network for data that is one chunk: it knows the noise in x."""

    def answer(x: Tensor, tau: Tensor) -> Tensor:
        t = round((1 - float(tau[0, 0])) * config.train_steps)
        bar = torch.tensor(alphas_bar(config.schedule, config.train_steps)[t])
        noise = (x - bar.sqrt() * clean) / (1 - bar).sqrt()
        return target(clean.expand_as(x), noise, bar, config.prediction).float()

    return Oracle(answer)


# --- schedules and steps


def test_golden_schedule(io: dict[str, Tensor]) -> None:
    close(torch.from_numpy(betas("cosine", 100)), io, "expected.betas")
    bars = torch.from_numpy(alphas_bar("cosine", 100))
    close(bars, io, "expected.alphas_cumprod")
    bar = bars[io["input.add_t"]][:, None].float()
    noised = add_noise(io["input.add_clean"][:, None], io["input.add_noise"][:, None], bar[:, None])
    close(noised[:, 0], io, "expected.add_noise")


def test_golden_numbers_of_the_published_schedules() -> None:
    dp, oft, octo = (betas("cosine", n) for n in (100, 50, 20))
    np.testing.assert_allclose(
        dp[[0, 1, 50, 98, 99]], [0.0006312816, 0.0011169370, 0.0315463394, 0.7499392804, 0.999], atol=1e-9
    )
    np.testing.assert_allclose(oft[[0, 25, 49]], [0.0017475135, 0.0630497774, 0.999], atol=1e-9)
    np.testing.assert_allclose(
        octo[[0, 1, 10, 18, 19]], [0.00799272, 0.020075, 0.15699708, 0.74847609, 0.999], atol=1e-8
    )
    np.testing.assert_allclose(alphas_bar("cosine", 100)[[0, 50]], [0.9993687184, 0.4782646329], atol=1e-9)
    assert alphas_bar("cosine", 100)[99] == pytest.approx(2.42857e-7, rel=1e-5)
    linear = betas("linear", 1000)
    assert (linear[0], linear[-1]) == (1e-4, 0.02)


@pytest.mark.parametrize("case", range(5))
def test_golden_trajectories(io: dict[str, Tensor], case: int) -> None:
    c = SPEC["config"]["cases"][case]
    x, visited = io[f"input.case{case}_start"], levels("cosine", 100, c["steps"])
    assert [level.t for level in visited] == io[f"expected.case{case}_timesteps"].tolist()
    clip, prediction, path = float(c["clip"]), NAMES[c["pred"]], []
    for j, level in enumerate(visited):
        answer, noise = io[f"input.case{case}_model_outputs"][j], io[f"input.case{case}_noise"][j]
        noise = noise if level.there < 1 else None
        if c["kind"] == "DDPM":
            x = ddpm_step(x, answer, level, prediction, clip, noise)
        else:
            x = ddim_step(x, answer, level, prediction, clip, noise if c["eta"] else None, c["eta"])
        path.append(x)
    close(torch.stack(path), io, f"expected.case{case}_trajectory")


def test_golden_of_the_diffusion_policy_unet() -> None:
    golden = load_file(GOLDEN / "unet.safetensors")
    bars = torch.from_numpy(alphas_bar("cosine", 100)).float()
    torch.testing.assert_close(bars, golden["intermediate.alphas_cumprod"], atol=2e-6, rtol=1e-5)
    noised = add_noise(golden["input.action"], golden["input.eps"], bars[golden["input.timesteps"]][:, None, None])
    torch.testing.assert_close(noised, golden["intermediate.noisy_trajectory"], atol=5e-6, rtol=1e-5)
    assert [level.t for level in Diffusion().levels] == golden["intermediate.ddim_timesteps"].tolist()


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_split_undoes_the_target(prediction: Prediction) -> None:
    rng = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 2, 3, 2, generator=rng, dtype=torch.float64)
    for bar in (0.999, 0.5, 0.001):
        b = torch.tensor(bar, dtype=torch.float64)
        x = add_noise(clean, noise, b)
        found = split(x, target(clean, noise, b, prediction), bar, prediction)
        torch.testing.assert_close(found[0], clean)
        torch.testing.assert_close(found[1], noise)


def test_ddim_with_eta_1_is_ddpm() -> None:
    rng = torch.Generator().manual_seed(0)
    x, answer, noise = torch.randn(3, 2, 3, 2, generator=rng)
    for level in levels("cosine", 50, 7)[:-1]:
        one = ddim_step(x, answer, level, "epsilon", 0.0, noise, eta=1.0)
        torch.testing.assert_close(one, ddpm_step(x, answer, level, "epsilon", 0.0, noise), atol=1e-5, rtol=1e-4)


def test_a_ddpm_step_is_the_posterior_of_the_forward_process() -> None:
    """Given x_0, the mean and variance of x_there given x_here, by conditioning a joint Gaussian."""
    level, clean, here = Level(5, 0.3, 0.6), 0.7, -0.4
    ratio = level.here / level.there
    mean_there, var_there = math.sqrt(level.there) * clean, 1 - level.there
    gain = var_there * math.sqrt(ratio) / (ratio * var_there + 1 - ratio)
    mean = mean_there + gain * (here - math.sqrt(ratio) * mean_there)
    variance = var_there - gain * math.sqrt(ratio) * var_there
    x, answer = torch.full((1, 1, 1), here), torch.full((1, 1, 1), clean)
    centre = float(ddpm_step(x, answer, level, "sample", 0.0, None))
    assert centre == pytest.approx(mean, abs=1e-6)
    moved = float(ddpm_step(x, answer, level, "sample", 0.0, torch.ones(1, 1, 1)))
    assert moved - centre == pytest.approx(math.sqrt(variance), abs=1e-6)
    large = float(ddpm_step(x, answer, level, "sample", 0.0, torch.ones(1, 1, 1), "large"))
    assert large - centre == pytest.approx(math.sqrt(1 - ratio), abs=1e-6)


# --- the head


def test_training_feeds_the_noised_chunk_and_its_time() -> None:
    network = Recorder()
    config = Diffusion(train_steps=20)
    n = 4000
    actions = torch.randn(n, 3, 2, generator=torch.Generator().manual_seed(0))
    loss = DiffusionHead(config, network, 3, 2).loss(
        fake_context(n), actions, torch.ones(n, 3, dtype=torch.bool), torch.Generator().manual_seed(1)
    )
    x, tau, _ = network.fed[0]
    noise = torch.randn(n, 3, 2, generator=torch.Generator().manual_seed(1))
    t = ((1 - tau) * 20).round().long()
    assert torch.bincount(t, minlength=20).min() > 0.7 * n / 20
    assert len(torch.bincount(t)) == 20
    bar = torch.from_numpy(alphas_bar("cosine", 20)).float()[t][:, None, None]
    torch.testing.assert_close(x, add_noise(actions, noise, bar))
    torch.testing.assert_close(loss.main.values, noise.square())


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_a_perfect_network_has_no_loss(prediction: Prediction) -> None:
    config = Diffusion(prediction=prediction)
    actions, valid = POINT.expand(50, 3, 2), torch.ones(50, 3, dtype=torch.bool)
    head = DiffusionHead(config, exact(config, POINT), 3, 2)
    for seed in range(5):  # the oracle reads one t for the whole batch
        rng = torch.Generator().manual_seed(seed)
        assert float(head.loss(fake_context(1), actions[:1], valid[:1], rng).mean()) < 1e-4


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
def test_samplers_land_on_the_data(prediction: Prediction, spacing: Spacing) -> None:
    for changes in (
        {"sampler": "ddim"},
        {"sampler": "ddim", "eta": 0.7},
        {"sampler": "ddpm"},
        {"sampler": "ddpm", "variance": "large"},
    ):
        for steps in (10, 16, 100):
            config = Diffusion(steps=steps, prediction=prediction, spacing=spacing, **changes)
            drawn = DiffusionHead(config, exact(config, POINT), 3, 2).sample(fake_context(2), rngs(2)).actions
            torch.testing.assert_close(drawn, POINT.expand(2, 3, 2), atol=1e-4, rtol=1e-4)


def test_U12_clipping_is_a_limit_on_actions() -> None:
    """A target at 2.5: drawn as it is without a clip, and as 1 with the clip of min-max scaled actions."""
    far = torch.full((3, 2), 2.5)
    for sampler in ("ddpm", "ddim"):
        for clip, reached in ((0.0, 2.5), (1.0, 1.0), (3.0, 2.5)):
            config = Diffusion(sampler=sampler, clip=clip, prediction="sample")
            drawn = DiffusionHead(config, exact(config, far), 3, 2).sample(fake_context(2), rngs(2)).actions
            torch.testing.assert_close(drawn, torch.full((2, 3, 2), reached), atol=1e-4, rtol=1e-4)


def test_octo_s_limit_holds_x_itself() -> None:
    config = Diffusion(20, 20, "ddpm", clip=0.0, variance="large", limit=5.0)
    network = Recorder()
    DiffusionHead(config, network, 3, 2).sample(fake_context(50), rngs(50))  # zero noise predicted: x grows
    assert all(float(x.abs().max()) <= 5 for x, _, _ in network.fed[1:])
    assert float(network.fed[-1][0].abs().max()) == 5


def test_the_network_is_told_tau_with_1_for_data() -> None:
    for spacing in ("leading", "trailing"):
        network = Recorder()
        config = Diffusion(steps=10, spacing=spacing)
        DiffusionHead(config, network, 3, 2).sample(fake_context(2), rngs(2))
        told = torch.stack([tau for _, tau, _ in network.fed if tau is not None])
        torch.testing.assert_close(told[:, 0], torch.tensor([1 - level.t / 100 for level in config.levels]))
        assert (told[1:] > told[:-1]).all()
        assert 0 < float(told.min()) < float(told.max()) <= 1
        assert len(network.fed) == DiffusionHead(config, network, 3, 2).cost().serial
    assert [level.t for level in Diffusion().levels] == [90, 80, 70, 60, 50, 40, 30, 20, 10, 0]
    assert [level.t for level in Diffusion(spacing="trailing").levels] == [99, 89, 79, 69, 59, 49, 39, 29, 19, 9]


def gaussian(config: Diffusion, mean: float, std: float) -> Oracle:
    """The perfect network (predicts the data) for independent normal data."""

    def answer(x: Tensor, tau: Tensor) -> Tensor:
        bar = alphas_bar(config.schedule, config.train_steps)[round((1 - float(tau[0, 0])) * config.train_steps)]
        share = math.sqrt(bar) * std**2 / (bar * std**2 + 1 - bar)
        return mean + share * (x - math.sqrt(bar) * mean)

    return Oracle(answer)


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_an_exact_network_draws_the_data_s_spread(sampler: str) -> None:
    """N(0.3, 0.5^2), 2000 x 4 numbers, 100 steps: spread within 3 %; ddpm's "small" variance is a lower bound, 6 %."""
    config = Diffusion(100, 100, sampler, "sample", clip=0.0)
    head = DiffusionHead(config, gaussian(config, 0.3, 0.5), 2, 2)
    drawn = head.sample(fake_context(2000), rngs(2000)).actions
    assert float(drawn.mean()) == pytest.approx(0.3, abs=0.02)
    assert float(drawn.std()) == pytest.approx(0.5, rel=0.06 if sampler == "ddpm" else 0.03)


def test_sample_b_uses_its_own_generator_alone() -> None:
    config = Diffusion(sampler="ddpm")
    head = DiffusionHead(config, Mlp(3, 2), 3, 2)
    with torch.no_grad():
        four, alone = (head.sample(fake_context(len(r)), r).actions for r in (rngs(4), rngs(4)[2:3]))
    torch.testing.assert_close(four[2:3], alone)
    assert (four[0] - four[1]).abs().max() > 0.01


def test_invalid_steps_and_other_samples_change_nothing() -> None:
    check_invalid_steps_do_nothing(DiffusionHead(Diffusion(prediction="v"), Mlp(4, 2), 4, 2), 4, 2)


@pytest.mark.parametrize("changes", [{"sampler": "ddim"}, {"sampler": "ddpm"}, {"sampler": "ddim", "eta": 1.0}])
def test_an_exact_network_draws_the_weights_of_a_mixture(changes: dict[str, object]) -> None:
    """0.3 at -0.6 and 0.7 at 0.6, std 0.1: 4000 samples, weight within 3 standard errors; spread within 10 %, but
    random steps of "small" variance draw a narrower one, by 17 % here (it is a lower bound)."""
    config = Diffusion(100, 50, prediction="sample", clip=0.0, **changes)

    def clean(x: Tensor, tau: Tensor) -> Tensor:
        bar = alphas_bar("cosine", 100)[round((1 - float(tau[0, 0])) * 100)]
        variance, total = bar * 0.01 + 1 - bar, 0.0
        each = []
        for mode, weight in ((-0.6, 0.3), (0.6, 0.7)):
            away = x - math.sqrt(bar) * mode
            each.append(
                (math.log(weight) - away.square() / (2 * variance), mode + math.sqrt(bar) * 0.01 / variance * away)
            )
        shares = torch.stack([e[0] for e in each]).softmax(dim=0)
        for share, (_, value) in zip(shares, each, strict=True):
            total = total + share * value
        return total

    drawn = DiffusionHead(config, Oracle(clean), 1, 1).sample(fake_context(4000), rngs(4000)).actions
    left = drawn < 0
    assert float(left.float().mean()) == pytest.approx(0.3, abs=0.022)
    spread = float((drawn - torch.where(left, -0.6, 0.6)).std())
    assert spread == pytest.approx(0.1 if changes == {"sampler": "ddim"} else 0.083, rel=0.1)


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_a_trained_head_recovers_the_weights_of_a_mixture(prediction: Prediction) -> None:
    """0.3 at -0.6 and 0.7 at 0.6, std 0.1. Weight within 0.06, 92 % of the samples near a mode."""
    config = Diffusion(50, 25, prediction=prediction)
    head = DiffusionHead(config, Mlp(1, 1, 48), 1, 1)

    def draw(i: int) -> Tensor:
        rng = torch.Generator().manual_seed(i)
        side = (torch.rand(128, 1, 1, generator=rng) > 0.3).float() * 2 - 1
        return 0.6 * side + 0.1 * torch.randn(128, 1, 1, generator=rng)

    fit(head, draw, 900, B=128, lr=1e-2)
    with torch.no_grad():
        drawn = head.sample(fake_context(2000), rngs(2000)).actions
    assert float((drawn < 0).float().mean()) == pytest.approx(0.3, abs=0.06)
    assert float(((drawn.abs() - 0.6).abs() < 0.35).float().mean()) > 0.92


def test_no_likelihood() -> None:
    head = DiffusionHead(Diffusion(), Recorder(), 3, 2)
    with pytest.raises(ConfigError, match="no likelihood"):
        head.log_prob(fake_context(1), POINT[None], torch.ones(1, 3, dtype=torch.bool), torch.Generator())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": 101}, "steps <= train_steps"),
        ({"clip": -1.0}, "clip"),
        ({"limit": float("nan")}, "limit"),
        ({"eta": 0.5, "sampler": "ddpm"}, "eta"),
        ({"variance": "large"}, "variance"),
        ({"schedule": "linear"}, "0.43 of the chunk"),
        ({"schedule": "linear", "steps": 100, "sampler": "ddpm"}, "0.36 of the chunk"),
        ({"steps": 60}, "trailing"),  # leading: t = 59 .. 0
        ({"steps": 2}, "trailing"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Diffusion(**changes)


def test_few_steps_are_fine_with_trailing_spacing() -> None:
    for steps in (1, 2, 3, 60):
        config = Diffusion(steps=steps, spacing="trailing", prediction="sample")
        drawn = DiffusionHead(config, gaussian(config, 0.3, 0.0), 2, 2).sample(fake_context(1), rngs(1)).actions
        torch.testing.assert_close(drawn, torch.full((1, 2, 2), 0.3), atol=1e-5, rtol=0)
