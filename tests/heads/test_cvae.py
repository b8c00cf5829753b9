"""CVAE: ACT's loss by its golden numbers, the posterior never runs in sampling, padding and neighbours do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from head_tools import Mlp, Recorder, check_invalid_steps_do_nothing, fake_context, fit
from safetensors.torch import load_file
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from tools import rngs
from vola.errors import ConfigError
from vola.heads.base import Loss
from vola.heads.cvae import Cvae, CvaeHead, Posterior, elbo_parts
from vola.model.trunk import ExpertConfig

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "act" / "loss.safetensors"
SMALL = ExpertConfig(8, 8, norm="layer", bias=True)


def config(**changes: object) -> Cvae:
    return Cvae(**{"latent": 2, "encoder": SMALL, "depth": 2, "heads": 2, **changes})


def make(H: int = 4, A: int = 2, S: int = 2, **changes: object) -> CvaeHead:
    c = config(**changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = CvaeHead(c, Mlp(H, A, latent=c.latent), H, A, S)
        with torch.no_grad():
            for p in head.parameters():
                p.add_(0.1 * torch.randn(p.shape))
    return head


def test_golden_loss_of_act() -> None:
    g = load_file(GOLDEN)
    latent = g["expected.mu"] + (g["expected.log_variance"] / 2).exp() * g["input.latent_noise"]
    assert latent.shape == (2, 8)
    valid = ~g["input.action_is_pad"]
    parts = elbo_parts(
        g["expected.actions_train"], g["input.action"], valid, g["expected.mu"], g["expected.log_variance"], "l1", 10.0
    )
    torch.testing.assert_close(parts["l1"].mean(), g["expected.l1_loss"], atol=2.3e-6, rtol=1e-5)
    torch.testing.assert_close(parts["kl"].mean(), g["expected.kl_loss"], atol=3.8e-5, rtol=1e-5)
    torch.testing.assert_close(Loss(parts).mean(), g["expected.loss"], atol=4.6e-4, rtol=1e-5)
    # The original code's mean also counts padded entries: the same number times the share of valid steps.
    original = parts["l1"].mean() * valid.float().mean()
    torch.testing.assert_close(original, g["expected.l1_loss_original_act"], atol=2e-6, rtol=1e-5)


def test_kl_is_that_of_normal_distributions() -> None:
    rng = torch.Generator().manual_seed(0)
    mu, log_variance = torch.randn(2, 5, 3, generator=rng)
    zeros = torch.zeros(5, 1, 1)
    parts = elbo_parts(zeros, zeros, torch.ones(5, 1, dtype=torch.bool), mu, log_variance, "l2", 1.0)
    expected = kl_divergence(Normal(mu, (log_variance / 2).exp()), Normal(torch.zeros(3), torch.ones(3))).sum(dim=1)
    torch.testing.assert_close(parts["kl"].values, expected)
    assert list(parts) == ["l2", "kl"]


@pytest.mark.parametrize(("norm", "power"), [("l1", 1), ("l2", 2)])
def test_training_decodes_mu_plus_sigma_noise(norm: str, power: int) -> None:
    head, network = make(norm=norm), Recorder()
    head.network = network
    actions, context = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0)), fake_context(3)
    valid = torch.ones(3, 4, dtype=torch.bool)
    loss = head.loss(context, actions, valid, torch.Generator().manual_seed(1))
    mu, log_variance = head.posterior(context.inputs.state[:, -1], actions, valid)
    x, tau, latent = network.fed[0]
    noise = torch.randn(3, 2, generator=torch.Generator().manual_seed(1))
    assert latent is not None
    torch.testing.assert_close(latent, mu + (log_variance / 2).exp() * noise)
    assert tau is None
    assert not x.any()
    torch.testing.assert_close(loss.parts[norm].values, actions.abs() ** power)  # the recorder answers 0
    assert loss.parts["kl"].weight == 10.0


def test_M06_the_posterior_does_not_run_when_sampling() -> None:
    for draw in ("zero", "prior"):
        head = make(draw=draw)
        with torch.no_grad():
            before = head.sample(fake_context(3), rngs(3)).actions
            del head.posterior
            assert torch.equal(before, head.sample(fake_context(3), rngs(3)).actions)


def test_draws_of_the_latent() -> None:
    zero, prior = make(draw="zero"), make(draw="prior")
    for head in (zero, prior):
        head.network = Recorder()
        head.sample(fake_context(2000), rngs(2000))
    latents = [head.network.fed[0][2] for head in (zero, prior)]
    assert not latents[0].any()
    assert latents[1].shape == (2000, 2)
    assert latents[1].mean().abs() < 0.06
    assert float(latents[1].std()) == pytest.approx(1, abs=0.05)
    head = make(draw="prior")
    with torch.no_grad():
        four, alone = (head.sample(fake_context(len(r)), r).actions for r in (rngs(4), rngs(4)[2:3]))
        torch.testing.assert_close(four[2:3], alone)
        fixed = [make(draw="zero").sample(fake_context(2), rngs(2, seed)).actions for seed in (0, 1)]
    assert torch.equal(*fixed)
    assert make().cost().serial == 1


def test_invalid_steps_and_other_samples_change_nothing() -> None:
    check_invalid_steps_do_nothing(make(), 4, 2)


def test_the_posterior_reads_state_actions_and_their_places() -> None:
    head, rng = make(), torch.Generator().manual_seed(0)
    state, actions = torch.randn(1, 2, generator=rng), torch.randn(1, 4, 2, generator=rng)
    valid = torch.ones(1, 4, dtype=torch.bool)

    def mean(s: Tensor, a: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat(head.posterior(s, a, v))

    base = mean(state, actions, valid)
    assert (mean(state + 1, actions, valid) - base).abs().max() > 1e-3
    for h in range(4):
        changed = actions.clone()
        changed[0, h] += 1
        assert (mean(state, changed, valid) - base).abs().max() > 1e-4
    assert (mean(state, actions.flip(1), valid) - base).abs().max() > 1e-3
    # A step keeps its place when earlier ones do not count: the same action two steps later is another chunk.
    one = torch.zeros(1, 4, 2)
    one[0, [1, 3]] = 1
    second, fourth = torch.tensor([[False, True, False, False]]), torch.tensor([[False, False, False, True]])
    assert (mean(state, one, second) - mean(state, one, fourth)).abs().max() > 1e-3


def test_padding_is_no_part_of_the_chunk() -> None:
    """A chunk of two steps and two padded ones is, to the posterior, the chunk of two steps."""
    long, short = make(4), make(2)
    short.posterior.load_state_dict(long.posterior.state_dict())
    state, actions = torch.randn(3, 2), torch.randn(3, 4, 2)
    with torch.no_grad():
        padded = long.posterior(state, actions, (torch.arange(4) < 2).expand(3, 4))
        alone = short.posterior(state, actions[:, :2], torch.ones(3, 2, dtype=torch.bool))
    for a, b in zip(padded, alone, strict=True):
        torch.testing.assert_close(a, b)


def test_a_robot_without_state_works() -> None:
    head = make(S=0)
    context = fake_context(3, S=0)
    loss = head.loss(context, torch.randn(3, 4, 2), torch.ones(3, 4, dtype=torch.bool), torch.Generator())
    loss.mean().backward()
    assert head.posterior.state is None
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in head.parameters())


def test_every_weight_of_the_posterior_learns() -> None:
    head = make()
    valid = torch.ones(8, 4, dtype=torch.bool)
    head.loss(fake_context(8), torch.randn(8, 4, 2), valid, torch.Generator().manual_seed(0)).mean().backward()
    idle = [n for n, p in head.posterior.named_parameters() if p.grad is None or not p.grad.any()]
    # Key biases cancel in the softmax; here they are part of qkv.bias, which has others.
    assert idle == []


def two_modes(i: int) -> Tensor:
    rng = torch.Generator().manual_seed(i)
    side = (torch.rand(128, 1, 1, generator=rng) > 0.5).float() * 2 - 1
    return (side + 0.05 * torch.randn(128, 1, 1, generator=rng)).expand(128, 3, 1)


def test_the_latent_carries_the_mode_and_its_weight_decides_how_much() -> None:
    """Chunks are all -1 or all +1. With a small KL weight prior draws give both modes; with a large one the posterior
    collapses onto the prior, and every draw is the same compromise."""
    results = {}
    for weight in (0.1, 100.0):
        head = make(3, 1, weight=weight, norm="l2", draw="prior", depth=1)
        fit(head, two_modes, 250, B=128, lr=1e-2)
        loss = head.loss(
            fake_context(128), two_modes(-1), torch.ones(128, 3, dtype=torch.bool), torch.Generator().manual_seed(0)
        )
        with torch.no_grad():
            drawn = head.sample(fake_context(500), rngs(500)).actions.mean(dim=(1, 2))
        results[weight] = (*(float(loss.parts[k].mean().detach()) for k in ("l2", "kl")), drawn)
    error, kl, drawn = results[0.1]
    assert error < 0.15
    assert 0.4 < kl < 3  # log 2 = 0.69 nats tell two modes apart
    assert float((drawn.abs() > 0.5).float().mean()) > 0.7
    assert 0.3 < float((drawn > 0).float().mean()) < 0.7
    error, kl, drawn = results[100.0]
    assert error > 0.8
    assert kl < 0.01
    assert float(drawn.abs().max()) < 0.4


@pytest.mark.parametrize(
    "changes",
    [
        *({"latent": 0}, {"weight": -1.0}, {"weight": float("nan")}, {"depth": 0}, {"heads": 3}),
        {"encoder": ExpertConfig(8, 8, norm="adaptive_rms", condition=8)},
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        config(**changes)


def test_no_likelihood() -> None:
    with pytest.raises(ConfigError, match="no likelihood"):
        make().log_prob(fake_context(1), torch.zeros(1, 4, 2), torch.ones(1, 4, dtype=torch.bool), torch.Generator())


def test_the_default_posterior_builds() -> None:
    mu, log_variance = Posterior(Cvae(), 5, 2, 3)(torch.zeros(2, 3), torch.zeros(2, 5, 2), torch.ones(2, 5).bool())
    assert mu.shape == log_variance.shape == (2, 32)
