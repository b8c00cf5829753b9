"""Log density of a flow: integrate from the data back to the noise and count how volume changes on the way."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from vola.heads.solvers import Solver, Velocity, integrate


def rademacher(n: int, like: Float[Tensor, "B H A"], rng: torch.Generator) -> Float[Tensor, "n B H A"]:
    """Probes whose entries are +1 or -1 with equal chance."""
    bits = torch.randint(0, 2, (n, *like.shape), generator=rng, device=rng.device)
    return (2 * bits - 1).to(like)


def divergence(
    velocity: Velocity, x: Float[Tensor, "B H A"], tau: float, probes: Float[Tensor, "n B H A"] | None
) -> tuple[Float[Tensor, "B H A"], Float[Tensor, " B"]]:
    """v(x, tau) and the trace of its Jacobian, sample by sample.

    probes None: exact, by H A vector-Jacobian products. Otherwise Hutchinson's estimate, the mean of e^T J e over the
    n probes e: unbiased, with variance 2 / n times the sum over i != j of ((J_ij + J_ji) / 2)^2.
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        v = velocity(x, tau)
    exact = probes is None
    if probes is None:
        n = x[0].numel()
        probes = torch.eye(n).to(x).view(n, 1, *x.shape[1:]).expand(n, *x.shape)
    total = x.new_zeros(x.shape[0])
    for e in probes:
        (row,) = torch.autograd.grad(v, x, e, retain_graph=True)
        total += (row * e).flatten(1).sum(dim=1)
    return v.detach(), total if exact else total / len(probes)


@torch.no_grad()
def flow_log_prob(
    velocity: Velocity,
    actions: Float[Tensor, "B H A"],
    solver: Solver,
    steps: int,
    probes: Float[Tensor, "n B H A"] | None = None,
) -> Float[Tensor, " B"]:
    """log p of chunks under the flow of ``velocity`` from N(0, I) at tau = 0, in nats per H A numbers.

    log p_1(x_1) = log N(x_0; 0, I) - integral over tau from 0 to 1 of the divergence of v along the path that ends in
    x_1. The path and the integral are found together by ``solver`` in ``steps`` steps from tau = 1 to 0; with probes
    the same ones serve the whole path. The result carries no gradient.

    Source: Chen et al. 2018, Neural ordinary differential equations (arXiv 1806.07366), eq. 8; the probes are
    FFJORD's (arXiv 1810.01367, section 3.1).
    """
    B = actions.shape[0]

    def augmented(state: Tensor, tau: float) -> Tensor:
        v, change = divergence(velocity, state[:, :-1].view(actions.shape), tau, probes)
        return torch.cat([v.flatten(1), change[:, None]], dim=1)

    start = torch.cat([actions.flatten(1), actions.new_zeros(B, 1)], dim=1)
    end = integrate(augmented, start, 1.0, 0.0, steps, solver)
    noise, change = end[:, :-1], end[:, -1]  # change: the integral from 1 to 0, so it has the sign wanted
    return change - noise.square().sum(dim=1) / 2 - noise.shape[1] * math.log(2 * math.pi) / 2
