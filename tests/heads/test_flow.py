"""Flow matching: exact fields land on the data, solvers have their order, densities are densities, guides are followed.

The mixture field is the exact velocity of data in two Gaussian modes, so samples and densities have known answers.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from head_tools import Mlp, Oracle, Recorder, check_invalid_steps_do_nothing, fake_context, fit
from scipy import stats
from torch import Tensor

from tools import batch, policy, rngs, system
from vola.errors import ConfigError, InputError
from vola.heads.flow import Flow, FlowHead
from vola.heads.guidance import GuideTensors, gain, guided
from vola.heads.likelihood import divergence, rademacher
from vola.heads.noising import beta_times, hold
from vola.heads.solvers import STAGES, Solver, evaluations, integrate
from vola.types import Guide

SOLVERS: tuple[Solver, ...] = tuple(STAGES)
MODES = torch.tensor([[-1.0, -0.5, 0.5], [0.8, 1.0, 1.2]])[..., None]  # two chunks, H = 3, A = 1
WEIGHTS, STD = torch.tensor([0.3, 0.7]), 0.2


def mixture_velocity(x: Tensor, tau: Tensor, std: float = STD) -> Tensor:
    """E[A - noise | x_tau = x] for A in mode k with probability w_k, normal with ``std`` around it."""
    tau = tau[:, 0, None, None, None]  # B 1 1 1 beside B k H A
    variance = (tau * std) ** 2 + (1 - tau) ** 2
    away = x[:, None] - tau * MODES.to(x)
    logits = WEIGHTS.log().to(x) - away.square().sum(dim=(2, 3)) / (2 * variance[..., 0, 0])
    share = logits.softmax(dim=1)[..., None, None]
    clean = MODES.to(x) + tau * std**2 / variance * away
    noise = (1 - tau) / variance * away
    return (share * (clean - noise)).sum(dim=1)


def mixture_log_prob(x: Tensor) -> Tensor:
    away = (x[:, None] - MODES).square().sum(dim=(2, 3))
    each = WEIGHTS.log() - away / (2 * STD**2) - 3 * math.log(STD * math.sqrt(2 * math.pi))
    return each.logsumexp(dim=1)


def mixture_draw(n: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    mode = (torch.rand(n, generator=rng) > WEIGHTS[0]).long()
    return MODES[mode] + STD * torch.randn(n, 3, 1, generator=rng)


def oracle(**changes: object) -> FlowHead:
    return FlowHead(Flow(**changes), Oracle(mixture_velocity), 3, 1)


def guide(B: int, weights: list[float], method: str = "vjp", delay: int = 0, limit: float = 5.0) -> GuideTensors:
    """The mode on the left, with small departures, to be continued by B samples."""
    actions = MODES[0] + torch.tensor([0.1, -0.1, 0.05])[:, None]
    w = torch.tensor(weights).expand(B, 3).clone()
    return GuideTensors(actions.expand(B, 3, 1).clone(), w, torch.full((B,), delay), method, limit)


# --- time and what is fed


def test_golden_times_of_pi0() -> None:
    """openpi's t = 1 - tau: mean and quantiles of systems.md; 1e5 draws have errors of about 1e-3."""
    t = 1 - beta_times(100_000, 1.5, 1.0, 0.999, torch.Generator().manual_seed(0)).double()
    assert float(t.mean()) == pytest.approx(0.6004, abs=0.003)
    quantiles = torch.quantile(t, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
    torch.testing.assert_close(quantiles, torch.tensor([0.21622, 0.63033, 0.93224]).double(), atol=0.005, rtol=0)


@pytest.mark.parametrize(("alpha", "beta"), [(1.5, 1.0), (2.0, 3.0), (0.5, 0.5)])
def test_times_follow_the_beta_distribution(alpha: float, beta: float) -> None:
    tau = beta_times(5000, alpha, beta, 0.9, torch.Generator().manual_seed(0))
    assert 0 <= float(tau.min()) <= float(tau.max()) <= 0.9
    assert stats.kstest(1 - tau.double().numpy() / 0.9, "beta", (alpha, beta)).pvalue > 0.01


def test_the_same_seed_draws_the_same_and_defaults_are_uniform() -> None:
    one, two = (FlowHead(Flow(time=t), Recorder(), 3, 1) for t in ("uniform", "beta"))
    u = one.draw_time(20_000, torch.Generator().manual_seed(5))
    assert stats.kstest(u.numpy(), "uniform").pvalue > 0.01
    torch.testing.assert_close(two.draw_time(20_000, torch.Generator().manual_seed(5)), 0.999 * (1 - u ** (1 / 1.5)))


def test_hold_repeats_the_last_valid_step() -> None:
    actions = torch.arange(12.0).view(3, 4, 1)
    valid = torch.tensor([[True, True, False, False], [False, True, False, True], [False] * 4])
    held = hold(torch.where(valid[..., None], actions, float("nan")), valid)
    assert held[..., 0].tolist() == [[0, 1, 1, 1], [5, 5, 5, 7], [0, 0, 0, 0]]


def test_training_feeds_the_straight_path() -> None:
    """x = (1 - tau) noise + tau A, and the loss of a network that says zero is (A - noise)^2."""
    network = Recorder()
    head = FlowHead(Flow(time="beta"), network, 3, 2)
    actions = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0))
    loss = head.loss(fake_context(5), actions, torch.ones(5, 3, dtype=torch.bool), torch.Generator().manual_seed(1))
    x, tau, _ = network.fed[0]
    noise = torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(x, (1 - tau[:, None, None]) * noise + tau[:, None, None] * actions)
    torch.testing.assert_close(loss.main.values, (actions - noise).square())


@pytest.mark.parametrize("prefix", [0, 2])
def test_invalid_steps_and_other_samples_change_nothing(prefix: int) -> None:
    head = FlowHead(Flow(prefix=prefix), Mlp(4, 2, times=4 if prefix else 1), 4, 2)
    check_invalid_steps_do_nothing(head, 4, 2)


# --- sampling


@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_have_their_order(solver: Solver) -> None:
    """dx/dtau = (1 + tau) x^2, both ways: the error falls by 2^order when the steps double."""
    x = torch.linspace(0.2, 0.5, 5, dtype=torch.float64)[:, None]

    def velocity(x: Tensor, tau: float) -> Tensor:
        return (1 + tau) * x.square()

    for start, stop in ((0.0, 1.0), (1.0, 0.0)):
        exact = 1 / (1 / x - (stop - start) * (1 + (stop + start) / 2))
        errors = [float((integrate(velocity, x, start, stop, n, solver) - exact).abs().max()) for n in (40, 80)]
        assert math.log2(errors[0] / errors[1]) == pytest.approx(evaluations(solver), abs=0.25)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_straight_field_lands_on_the_data_with_any_steps(solver: Solver, steps: int) -> None:
    """One chunk: v = (A - x) / (1 - tau). heun and rk4 look at tau = 1, where its limit is A - noise, the constant."""
    noise = torch.from_numpy(np.stack([g.standard_normal((3, 1), dtype=np.float32) for g in rngs(4)]))
    exact = Oracle(lambda x, tau: (MODES[0] - x) / (1 - tau[..., None]))
    constant = Oracle(lambda x, tau: MODES[0] - noise)
    head = FlowHead(Flow(steps, solver=solver), exact if solver in ("euler", "midpoint") else constant, 3, 1)
    torch.testing.assert_close(head.sample(fake_context(4), rngs(4)).actions, MODES[0].expand(4, 3, 1))


def test_one_euler_step_is_the_conditional_mean() -> None:
    drawn = oracle(steps=1).sample(fake_context(6), rngs(6)).actions
    mean = (WEIGHTS[:, None, None] * MODES).sum(dim=0)
    torch.testing.assert_close(drawn, mean.expand(6, 3, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_an_exact_field_draws_the_mixture(solver: Solver) -> None:
    """4000 samples: weight within 3 standard errors (0.022); spread within 5 %."""
    n = 4000
    drawn = oracle(steps=100 // evaluations(solver), solver=solver).sample(fake_context(n), rngs(n)).actions
    left = drawn[:, 0, 0] < 0
    assert float(left.float().mean()) == pytest.approx(0.3, abs=0.022)
    for k, rows in ((0, left), (1, ~left)):
        torch.testing.assert_close(drawn[rows].mean(dim=0), MODES[k], atol=0.02, rtol=0)
        assert float(drawn[rows].std(dim=0).mean()) == pytest.approx(STD, rel=0.05)


def test_sample_b_uses_its_own_generator_alone() -> None:
    all_four = oracle().sample(fake_context(4), rngs(4)).actions
    alone = oracle().sample(fake_context(1), rngs(4)[2:3]).actions
    torch.testing.assert_close(all_four[2:3], alone)


@pytest.mark.parametrize("solver", SOLVERS)
def test_cost_is_the_number_of_calls(solver: Solver) -> None:
    network = Recorder()
    head = FlowHead(Flow(3, solver=solver), network, 3, 1)
    head.sample(fake_context(1), rngs(1))
    assert len(network.fed) == head.cost().serial
    assert all(bool((t >= 0).all() and (t <= 1).all()) for _, t, _ in network.fed)


# --- a trained flow: weights, likelihood


def test_a_trained_flow_recovers_weights_and_density() -> None:
    """1-D mixture, 0.3 at -1 and 0.7 at 1, std 0.25. Weight within 0.04; log density within 0.15 nats of the truth on
    average, and it integrates to 1."""
    head = FlowHead(Flow(20, solver="heun"), Mlp(1, 1, 48), 1, 1)

    def draw(i: int, n: int = 256) -> Tensor:
        rng = torch.Generator().manual_seed(1000 + i)
        side = (torch.rand(n, 1, 1, generator=rng) > 0.3).float() * 2 - 1
        return side + 0.25 * torch.randn(n, 1, 1, generator=rng)

    fit(head, lambda i: draw(i, 128), 800, B=128, lr=1e-2)
    n = 3000
    with torch.no_grad():
        drawn = head.sample(fake_context(n), rngs(n)).actions
    assert float((drawn < 0).float().mean()) == pytest.approx(0.3, abs=0.04)
    test = draw(-1, 500)
    truth = np.logaddexp(
        math.log(0.3) + stats.norm.logpdf(test.double().numpy(), -1, 0.25),
        math.log(0.7) + stats.norm.logpdf(test.double().numpy(), 1, 0.25),
    ).ravel()
    valid, rng = torch.ones(500, 1, dtype=torch.bool), torch.Generator()
    found = head.log_prob(fake_context(500), test, valid, rng).double().numpy()
    assert not np.isnan(found).any()
    assert abs((truth - found).mean()) < 0.15
    grid = torch.linspace(-6, 6, 2001)[:, None, None]
    valid = torch.ones(2001, 1, dtype=torch.bool)
    density = head.log_prob(fake_context(2001), grid, valid, rng, solver="rk4", steps=25).exp()
    assert float(density.sum() * 12 / 2000) == pytest.approx(1, abs=2e-3)


def test_any_network_gives_a_density_that_integrates_to_one() -> None:
    network = Mlp(1, 2, seed=4)
    with torch.no_grad():
        network.body[4].weight.mul_(20)
    head = FlowHead(Flow(solver="rk4"), network, 1, 2)
    axis = torch.linspace(-7, 7, 141)
    grid = torch.cartesian_prod(axis, axis).view(-1, 1, 2)
    valid = torch.ones(len(grid), 1, dtype=torch.bool)
    density = head.log_prob(fake_context(len(grid)), grid, valid, torch.Generator(), steps=10).exp()
    assert float(density.sum() * 0.1**2) == pytest.approx(1, abs=2e-3)
    noise = (-grid.square().sum(dim=(1, 2)) / 2).exp() / (2 * math.pi)
    assert float((density - noise).abs().max()) > 0.02  # the network does move the noise


@pytest.mark.parametrize(
    ("solver", "steps", "error"), [("euler", 100, 0.5), ("midpoint", 100, 0.02), ("rk4", 25, 0.01)]
)
def test_log_prob_of_the_exact_field_is_that_of_the_data(solver: Solver, steps: int, error: float) -> None:
    actions, valid = mixture_draw(64, 0), torch.ones(64, 3, dtype=torch.bool)
    found = oracle().log_prob(fake_context(64), actions, valid, torch.Generator(), steps, solver)
    assert float((found - mixture_log_prob(actions)).abs().max()) < error


def test_log_prob_of_correlated_gaussian_data() -> None:
    """v = m + (tau S - (1 - tau)) (tau^2 S + (1 - tau)^2)^-1 (x - tau m) carries N(0, I) to N(m, S)."""
    rng = torch.Generator().manual_seed(0)
    half, m = torch.randn(4, 4, generator=rng, dtype=torch.float64), torch.randn(4, generator=rng, dtype=torch.float64)
    S, eye = half @ half.T / 4 + 0.1 * torch.eye(4), torch.eye(4, dtype=torch.float64)

    def field(x: Tensor, tau: Tensor) -> Tensor:
        t = float(tau[0, 0])
        matrix = (t * S - (1 - t) * eye) @ torch.linalg.inv(t**2 * S + (1 - t) ** 2 * eye)
        return (m + (x.flatten(1).double() - t * m) @ matrix.T).view(x.shape).float()

    head = FlowHead(Flow(solver="rk4"), Oracle(field), 2, 2)
    actions = (m + torch.randn(20, 4, generator=rng, dtype=torch.float64) @ half.T / 2).float().view(20, 2, 2)
    valid, context = torch.ones(20, 2, dtype=torch.bool), fake_context(20)
    truth = torch.distributions.MultivariateNormal(m, S).log_prob(actions.flatten(1).double()).float()
    exact = head.log_prob(context, actions, valid, rng, steps=30)
    torch.testing.assert_close(exact, truth, atol=2e-3, rtol=1e-3)
    many = head.log_prob(context, actions, valid, rng, steps=10, probes=64)
    few = head.log_prob(context, actions, valid, rng, steps=10, probes=1)
    assert (many - truth).abs().mean() < 0.3 * (few - truth).abs().mean()  # expected 1 / 8


def test_divergence_is_the_trace_of_the_jacobian() -> None:
    network, x = (
        Mlp(2, 2).double(),
        torch.randn(3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    )
    context = fake_context(3)

    def velocity(x: Tensor, tau: float) -> Tensor:
        return network(context, x, torch.full(x.shape[:1], tau))

    v, exact = divergence(velocity, x, 0.3, None)
    torch.testing.assert_close(v, velocity(x, 0.3).detach())
    jacobian = torch.autograd.functional.jacobian(lambda y: velocity(y, 0.3), x)
    per_sample = torch.stack([jacobian[b, :, :, b].reshape(4, 4) for b in range(3)])
    torch.testing.assert_close(exact, per_sample.diagonal(dim1=1, dim2=2).sum(dim=1))
    # Hutchinson: unbiased, with the variance that the docstring states.
    probes = rademacher(1000, x, torch.Generator().manual_seed(2))
    assert set(probes.unique().tolist()) == {-1.0, 1.0}
    each = torch.stack([divergence(velocity, x, 0.3, e[None])[1] for e in probes])
    off = ((per_sample + per_sample.transpose(1, 2)) / 2) * (1 - torch.eye(4))
    variance = 2 * off.square().sum(dim=(1, 2))
    torch.testing.assert_close(each.var(dim=0), variance, rtol=0.2, atol=1e-6)
    assert ((each.mean(dim=0) - exact).abs() < 4 * (variance / 1000).sqrt() + 1e-9).all()


def test_log_prob_refuses_what_it_cannot_know() -> None:
    valid = torch.tensor([[True] * 3, [True, True, False]])
    with pytest.raises(InputError, match=r"samples \[1\]"):
        oracle().log_prob(fake_context(2), MODES, valid, torch.Generator())
    with pytest.raises(ConfigError, match="probes"):
        oracle().log_prob(fake_context(2), MODES, torch.ones_like(valid), torch.Generator(), probes=-1)
    with pytest.raises(ConfigError, match="steps"):
        oracle().log_prob(fake_context(2), MODES, torch.ones_like(valid), torch.Generator(), steps=0)


# --- guidance


def test_gain_is_that_of_the_paper() -> None:
    for t in np.linspace(0.05, 0.95, 19):
        c, inverse_r2 = (1 - t) / t, (t**2 + (1 - t) ** 2) / (1 - t) ** 2
        assert gain(float(t), 5.0) == pytest.approx(min(c * inverse_r2, 5.0))
    assert gain(0.5, 5.0) == pytest.approx(2.0)
    assert gain(0.0, 5.0) == gain(1.0, 5.0) == 5.0


def test_vjp_equals_finite_differences_and_identity_drops_the_jacobian() -> None:
    network, rng = Mlp(3, 1, seed=3).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        network.body[4].weight.mul_(3)
    context, x, tau = fake_context(2), torch.randn(2, 3, 1, dtype=torch.float64, generator=rng), 0.3

    def velocity(x: Tensor, tau: float) -> Tensor:
        return network(context, x, torch.full(x.shape[:1], tau, dtype=torch.float64))

    g = guide(2, [1.0, 0.5, 0.0])
    with torch.no_grad():
        v = velocity(x, tau)
        error = g.weights[..., None] * (g.actions - (x + (1 - tau) * v))
        expected, eps = torch.zeros_like(x), 1e-5
        for b in range(2):
            for h in range(3):
                step = torch.zeros_like(x)
                step[b, h] = eps
                up, down = (s * step + x + (1 - tau) * velocity(x + s * step, tau) for s in (1, -1))
                expected[b, h] = (error * (up - down)).sum() / (2 * eps)
        followed = guided(velocity, g)(x, tau)
        dropped = guided(velocity, guide(2, [1.0, 0.5, 0.0], "identity"))(x, tau)
    torch.testing.assert_close(followed, v + gain(tau, 5.0) * expected, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(dropped, v + gain(tau, 5.0) * error)
    assert (followed - dropped).abs().max() > 0.01
    assert not followed.requires_grad


@pytest.mark.parametrize("method", ["vjp", "identity"])
def test_no_weights_is_no_guide_and_frozen_steps_are_kept(method: str) -> None:
    n, context = 200, fake_context(200)
    with torch.no_grad():
        free = oracle(steps=20).sample(context, rngs(n)).actions
        none = oracle(steps=20).sample(context, rngs(n), guide(n, [0.0, 0.0, 0.0], method)).actions
        assert torch.equal(free, none)
        g = guide(n, [1.0, 1.0, 0.0], method)
        held = oracle(steps=20).sample(context, rngs(n), g).actions
    away = (held - g.actions).abs()[:, :, 0]
    # Frozen steps: 0.15 away at most on average, where free samples are 1.3 away and a mode is 0.2 wide.
    assert float(away[:, :2].mean()) < 0.15
    assert float((free - g.actions).abs()[:, :2].mean()) > 1
    # The free step follows: the mode of the guide, not the likelier one.
    assert float((held[:, 2, 0] - MODES[0, 2, 0]).abs().mean()) < 0.2


def test_rows_without_weights_are_not_moved_by_guided_ones() -> None:
    g = guide(2, [1.0, 1.0, 0.0])
    g.weights[0] = 0
    free = oracle().sample(fake_context(2), rngs(2)).actions
    mixed = oracle().sample(fake_context(2), rngs(2), g).actions
    torch.testing.assert_close(mixed[0], free[0])
    assert (mixed[1] - free[1]).abs().max() > 0.03


@pytest.mark.parametrize("method", ["vjp", "identity"])
def test_what_stands_where_the_weight_is_zero_is_not_read(method: str) -> None:
    g = guide(2, [1.0, 0.5, 0.0], method)
    base = oracle().sample(fake_context(2), rngs(2), g).actions
    g.actions[:, 2] = float("nan")
    assert torch.equal(base, oracle().sample(fake_context(2), rngs(2), g).actions)


def test_a_policy_follows_a_guide_through_its_trunk() -> None:
    """Physical units, cached prefix, no_grad: weights 0 bit for bit as without, weights 1 nearer than free."""
    made = system(head=Flow(10))
    p, b, H = policy(made), batch(made), made.H
    free = p.plan(b.observation, rngs(3)).actions
    target = np.zeros_like(free)
    for method in ("vjp", "identity"):
        ones, zeros, delay = np.ones((3, H), np.float32), np.zeros((3, H), np.float32), np.zeros(3, np.int64)
        none = p.plan(b.observation, rngs(3), Guide(target, zeros, delay, method, 5.0)).actions
        np.testing.assert_array_equal(none, free)
        held = p.plan(b.observation, rngs(3), Guide(target, ones, delay, method, 5.0)).actions
        assert np.abs(held - target).mean() < 0.5 * np.abs(free - target).mean()
    assert all(q.grad is None for q in p.parameters())


# --- trained to continue a prefix


def test_prefix_training_feeds_known_steps_clean() -> None:
    network = Recorder()
    head = FlowHead(Flow(prefix=2), network, 4, 1)
    n = 3000
    actions = torch.randn(n, 4, 1, generator=torch.Generator().manual_seed(0))
    valid = torch.ones(n, 4, dtype=torch.bool)
    valid[:, 3] = False
    part = head.loss(fake_context(n), actions, valid, torch.Generator().manual_seed(1)).main
    x, tau, _ = network.fed[0]
    clean = tau == 1
    known = clean.sum(dim=1)
    assert torch.equal(clean, torch.arange(4) < known[:, None])
    assert torch.equal(x[clean], actions[clean])
    counts = torch.bincount(known, minlength=3)
    assert len(counts) == 3
    assert stats.chisquare(counts.numpy()).pvalue > 0.01
    assert torch.equal(part.valid[..., 0], valid & ~clean)
    free = torch.where(clean, 2.0, tau)
    assert all(len(row[row < 2].unique()) == 1 for row in free[:20])  # one time for the rest


def test_prefix_sampling_clamps_and_continues() -> None:
    """Chunks are all -1 or all +1 (and a little noise): given the first step, the rest agree with it."""
    head = FlowHead(Flow(10, prefix=2), Mlp(3, 1, 48, times=3), 3, 1)

    def draw(i: int) -> Tensor:
        rng = torch.Generator().manual_seed(i)
        side = (torch.rand(256, 1, 1, generator=rng) > 0.5).float() * 2 - 1
        return side + 0.05 * torch.randn(256, 3, 1, generator=rng)

    fit(head, draw, 500)
    n, context = 200, fake_context(200)
    delay = torch.arange(n) % 3
    sign = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0)[:, None, None]
    g = GuideTensors(sign.expand(n, 3, 1).clone(), (torch.arange(3) < delay[:, None]).float(), delay, "prefix", 5.0)
    with torch.no_grad():
        free = head.sample(context, rngs(n)).actions
        drawn = head.sample(context, rngs(n), g).actions
    for d in (1, 2):
        rows = delay == d
        assert torch.equal(drawn[rows, :d], g.actions[rows, :d])
        agree = (drawn[rows, d:].sign() == sign[rows]).float().mean()
        assert float(agree) > 0.97
    torch.testing.assert_close(drawn[delay == 0], free[delay == 0])
    assert 0.3 < float((free.mean(dim=(1, 2)) > 0).float().mean()) < 0.7


def test_prefix_sampling_tells_the_network_what_is_known() -> None:
    network = Recorder()
    head = FlowHead(Flow(4, solver="midpoint", prefix=2), network, 3, 1)
    g = guide(3, [1.0, 1.0, 0.0], "prefix", 2)
    g.delay[0] = 0
    head.sample(fake_context(3), rngs(3), g)
    clean = torch.arange(3) < g.delay[:, None]
    for i, (x, tau, _) in enumerate(network.fed):
        assert tau is not None
        torch.testing.assert_close(tau, torch.where(clean, 1.0, i / 8))
        assert torch.equal(x[clean], g.actions[clean])


def test_prefix_needs_training_for_it() -> None:
    with pytest.raises(ConfigError, match="prefix >= 2"):
        oracle(prefix=1).sample(fake_context(1), rngs(1), guide(1, [1.0, 1.0, 0.0], "prefix", 2))
    with pytest.raises(ConfigError, match="prefix < H"):
        oracle(prefix=3)


@pytest.mark.parametrize(
    "changes",
    [
        *({"steps": 0}, {"time": "normal"}, {"alpha": 0.0}, {"beta": -1.0}, {"cutoff": 0.0}, {"cutoff": 1.5}),
        *({"solver": "rk45"}, {"prefix": -1}, {"prefix": True}, {"alpha": float("nan")}),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises((ConfigError, TypeError)):  # TypeError: the shape and type checks of tests come first
        Flow(**changes)


def test_guides_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="guide actions"):
        oracle().sample(fake_context(2), rngs(2), guide(3, [1.0, 0.0, 0.0]))
    with pytest.raises(ConfigError, match="limit"):
        oracle().sample(fake_context(2), rngs(2), guide(2, [1.0, 0.0, 0.0], limit=0.0))
