"""Real-time chunking inside the sampler: a new plan is pulled towards the rest of the one in execution.

Time runs as everywhere here: tau = 0 is noise, tau = 1 is data, as in the paper and its code. LeRobot runs the other
way and drops the Jacobian (``method="identity"``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vola.cite import Source
from vola.errors import ConfigError, expect_shape
from vola.heads.solvers import Velocity


@dataclass(frozen=True)
class GuideTensors:
    """``vola.types.Guide`` in normalised units: what each new chunk has to continue, step 0 is now.

    actions: ``B H A``, read only where the weight is not 0. weights: ``B H`` in [0, 1]: 1 = keep, 0 = free.
    delay: ``B``, steps that will be executed before the new chunk takes over.
    method: "vjp", "identity" or "prefix". limit: largest gain of the guidance (beta_max).
    """

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Black et al. 2025, Real-time execution of action chunking flow policies",
            "eq. 2 to 4",
            "tau = 0 is noise; at tau = 0 the gain is the limit",
            "https://arxiv.org/abs/2506.07339",
        ),
        Source(
            "Black et al. 2025, Training-time action conditioning for efficient real-time chunking",
            "",
            "method 'prefix': the first steps are handed over clean, at their own tau = 1",
            "https://arxiv.org/abs/2512.05964",
        ),
    )
    actions: Float[Tensor, "B H A"]
    weights: Float[Tensor, "B H"]
    delay: Int64[Tensor, " B"]
    method: Literal["vjp", "identity", "prefix"]
    limit: float

    def check(self, B: int, H: int, A: int) -> None:
        """Raises InputError on a wrong shape, ConfigError on another method or a limit that is not positive."""
        expect_shape("guide actions", self.actions, "B H A", B=B, H=H, A=A)
        expect_shape("guide weights", self.weights, "B H", B=B, H=H)
        expect_shape("guide delay", self.delay, "B", B=B)
        if self.method not in ("vjp", "identity", "prefix") or not self.limit > 0:
            raise ConfigError(
                f"guide: expected method 'vjp', 'identity' or 'prefix' and limit > 0, got {self.method!r} and "
                f"{self.limit!r}"
            )


def gain(tau: float, limit: float) -> float:
    """How hard the guidance pulls: min(c / r^2, limit) with c = (1 - tau) / tau, r^2 = (1 - tau)^2 / (tau^2 + (1 -
    tau)^2), that is (tau^2 + (1 - tau)^2) / (tau (1 - tau)). It grows without limit towards both ends of time."""
    if not 0 < tau < 1:
        return limit
    return min((tau**2 + (1 - tau) ** 2) / (tau * (1 - tau)), limit)


def guided(velocity: Velocity, guide: GuideTensors) -> Velocity:
    """The velocity plus gain times the correction, by the method "vjp" or "identity".

    With clean = x + (1 - tau) v(x, tau), the chunk that x is heading for, and error = weights (actions - clean):
    "vjp" corrects by error^T d clean / d x, one backward pass of the network per evaluation; "identity" by the error.
    It is a velocity like any other: every solver evaluates it at its own stages. Not under ``torch.inference_mode``.
    """

    def follow(x: Tensor, tau: float) -> Tensor:
        if guide.method == "identity":
            v = velocity(x, tau)
            return v + gain(tau, guide.limit) * _error(guide, x + (1 - tau) * v)
        with torch.enable_grad():
            start = x.detach().requires_grad_()
            v = velocity(start, tau)
            clean = start + (1 - tau) * v
        (correction,) = torch.autograd.grad(clean, start, _error(guide, clean.detach()))
        return v.detach() + gain(tau, guide.limit) * correction

    return follow


def _error(guide: GuideTensors, clean: Tensor) -> Tensor:
    weights = guide.weights[..., None].to(clean)
    return torch.where(weights > 0, weights * (guide.actions.to(clean) - clean), 0)
