"""Flow matching on the straight path. tau = 0 is noise, tau = 1 is data (openpi runs the other way).

    A_tau = (1 - tau) noise + tau A,      target velocity = A - noise,      A_{tau + 1/K} = A_tau + v / K

Source: Lipman et al. 2023 (conditional optimal-transport path, sigma_min = 0); pi0, section IV and appendix B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vola.cite import Source
from vola.errors import ConfigError, InputError, expect_positive
from vola.heads.base import Cost, Drawn, Head, Loss, Part, noise_like_chunk
from vola.heads.guidance import GuideTensors, guided
from vola.heads.likelihood import flow_log_prob, rademacher
from vola.heads.noising import beta_times, hold
from vola.heads.solvers import Solver, Velocity, evaluations, integrate
from vola.model.backbone import Context


@dataclass(frozen=True)
class Flow:
    """``steps`` K of ``solver``, from noise to data.

    time: how training draws tau: "uniform" in [0, 1), or "beta" = pi0's emphasis of noisy times,
        tau = cutoff (1 - b) with b ~ Beta(alpha, beta).
    solver: "euler" calls the network once per step, "midpoint" and "heun" twice, "rk4" four times; the last two also
        at tau = 1, which times up to a cutoff do not train.
    prefix: P > 0 trains the network to continue P or fewer steps that are known: each sample draws a number d
        uniformly out of 0..P, its first d steps are fed clean with a tau of 1 of their own, and only the others count
        in the loss. Sampling can then be guided by method "prefix". The network needs a time per step.
    """

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Lipman et al. 2023, Flow matching for generative modeling",
            "eq. 20, sigma_min = 0",
            "tau = 0 is noise, tau = 1 is data",
            "https://arxiv.org/abs/2210.02747",
        ),
        Source(
            "Black et al. 2024, pi0: A vision-language-action flow model for general robot control",
            "section IV, appendix B",
            "Beta(1.5, 1) emphasises noisy times; openpi's time runs the other way",
            "https://arxiv.org/abs/2410.24164",
        ),
    )
    steps: int = 10
    time: Literal["uniform", "beta"] = "uniform"
    alpha: float = 1.5
    beta: float = 1.0
    cutoff: float = 0.999
    solver: Solver = "euler"
    prefix: int = 0

    def __post_init__(self) -> None:
        expect_positive("flow", steps=self.steps)
        if self.time not in ("uniform", "beta"):
            raise ConfigError(f"flow: expected time 'uniform' or 'beta', got {self.time!r}")
        if self.solver not in get_args(Solver):
            raise ConfigError(f"flow: expected a solver out of {get_args(Solver)}, got {self.solver!r}")
        if not (0 < self.alpha < float("inf") and 0 < self.beta < float("inf")):
            raise ConfigError(f"flow: expected alpha > 0 and beta > 0, got {self.alpha} and {self.beta}")
        if not 0 < self.cutoff <= 1:
            raise ConfigError(f"flow: expected 0 < cutoff <= 1, got {self.cutoff}")
        if isinstance(self.prefix, bool) or not isinstance(self.prefix, int) or self.prefix < 0:
            raise ConfigError(f"flow: expected prefix >= 0 (a whole number of steps), got {self.prefix!r}")


@final
class FlowHead(Head):
    """The rule of ``Flow`` over a network with time.

    Raises:
        ConfigError: a prefix as long as the chunk: nothing would be left to draw.
    """

    def __init__(self, config: Flow, network: nn.Module, H: int, A: int) -> None:
        super().__init__()
        if config.prefix >= H:
            raise ConfigError(f"flow: expected prefix < H = {H}, got {config.prefix}. Predict more or freeze less.")
        self.config, self.network, self.H, self.A = config, network, H, A

    def draw_time(self, B: int, rng: torch.Generator) -> Float[Tensor, " B"]:
        """Training times, one uniform number each (see ``beta_times``)."""
        if self.config.time == "uniform":
            return torch.rand(B, generator=rng, device=rng.device)
        return beta_times(B, self.config.alpha, self.config.beta, self.config.cutoff, rng)

    def loss(
        self, context: Context, actions: Float[Tensor, "B H A"], valid: Bool[Tensor, "B H"], rng: torch.Generator
    ) -> Loss:
        """Squared error of the velocity. What the network is fed in steps that are not valid says ``hold``."""
        B, P = actions.shape[0], self.config.prefix
        actions = hold(actions, valid)
        noise = torch.randn(actions.shape, generator=rng, device=rng.device).to(actions.device)
        tau = self.draw_time(B, rng).to(actions.device)
        if P:
            known = torch.randint(0, P + 1, (B,), generator=rng, device=rng.device).to(actions.device)
            clean = torch.arange(self.H, device=actions.device) < known[:, None]
            tau = torch.where(clean, 1.0, tau[:, None])
            valid = valid & ~clean
        weight = tau[:, :, None] if P else tau[:, None, None]
        x = torch.lerp(noise, actions, weight)
        error = self.network(context, x, tau).float() - (actions - noise)
        return Loss({"flow": Part(error.square(), valid[..., None])})

    def _velocity(self, context: Context, x: Tensor, tau: float, clean: Tensor | None = None) -> Tensor:
        """The network's velocity; with a prefix the time is one per step, 1 where ``clean``."""
        if self.config.prefix:
            times = torch.full(x.shape[:2], tau, device=x.device)
            times = times if clean is None else torch.where(clean, 1.0, times)
        else:
            times = torch.full(x.shape[:1], tau, device=x.device)
        return self.network(context, x, times).float()

    def sample(self, context: Context, rngs: Sequence[np.random.Generator], guide: GuideTensors | None = None) -> Drawn:
        """One chunk per sample, drawn with that sample's own generator.

        guide: what the chunks have to continue. Without any weight the result is the unguided one, bit for bit.

        Raises:
            ConfigError: method "prefix" with a delay beyond ``config.prefix``.
            InputError: a guide of another shape.
        """
        x = noise_like_chunk(rngs, self.H, self.A, context.segment.tokens.device)

        def free(x: Tensor, tau: float) -> Tensor:
            return self._velocity(context, x, tau)

        velocity: Velocity = free
        if guide is not None:
            guide.check(len(rngs), self.H, self.A)
            if guide.method == "prefix":
                return Drawn(self._continue(context, x, guide))
            if bool((guide.weights > 0).any()):
                velocity = guided(free, guide)
        return Drawn(integrate(velocity, x, 0.0, 1.0, self.config.steps, self.config.solver))

    def _continue(self, context: Context, x: Tensor, guide: GuideTensors) -> Tensor:
        """Draw the rest of chunks whose first ``guide.delay`` steps are known."""
        longest = int(guide.delay.max())
        if longest > self.config.prefix:
            raise ConfigError(
                f"flow: method 'prefix' with a delay of {longest} steps needs a head trained with prefix >= {longest}, "
                f"got prefix={self.config.prefix}. Train so, or guide by method 'vjp'."
            )
        clean = torch.arange(self.H, device=x.device) < guide.delay[:, None]
        known = torch.where(clean[..., None], guide.actions.to(x), 0)

        def velocity(x: Tensor, tau: float) -> Tensor:
            return self._velocity(context, torch.where(clean[..., None], known, x), tau, clean)

        drawn = integrate(velocity, x, 0.0, 1.0, self.config.steps, self.config.solver)
        return torch.where(clean[..., None], known, drawn)

    def cost(self) -> Cost:
        """Forward passes; guidance by "vjp" adds a backward pass to each."""
        return Cost(serial=self.config.steps * evaluations(self.config.solver))

    def log_prob(
        self,
        context: Context,
        actions: Float[Tensor, "B H A"],
        valid: Bool[Tensor, "B H"],
        rng: torch.Generator,
        steps: int = 25,
        solver: Solver = "rk4",
        probes: int = 0,
    ) -> Float[Tensor, " B"]:
        """Log density (nats) of whole chunks of H A normalised actions under the flow, without gradient.

        By the instantaneous change of variables (``flow_log_prob``). This is the density of the flow itself: it has
        the solver's error at these ``steps``, and a sampler with few steps draws from a slightly different one.

        Args:
            steps, solver: of the integration from data to noise, whatever the sampler's are.
            probes: 0: exact divergence, H A backward passes per evaluation. n: Hutchinson's estimate with n random
                signs per number from ``rng``, the same along a chunk's whole path: unbiased but for the solver.

        Raises:
            InputError: steps that are not valid. The density of the others alone is an integral that no one path gives.
            ConfigError: steps < 1 or probes < 0.
        """
        if not bool(valid.all()):
            rows = torch.nonzero(~valid.all(dim=1)).flatten().tolist()
            raise InputError(
                f"flow: log_prob expects chunks whose {self.H} steps are all valid, got others in samples "
                f"{str(rows)[:60]}. Leave out windows that reach past the end of their episode."
            )
        expect_positive("flow log_prob", steps=steps)
        if probes < 0:
            raise ConfigError(f"flow log_prob: expected probes >= 0, got {probes}")
        signs = rademacher(probes, actions, rng) if probes else None

        def velocity(x: Tensor, tau: float) -> Tensor:
            return self._velocity(context, x, tau)

        return flow_log_prob(velocity, actions.float(), solver, steps, signs)
