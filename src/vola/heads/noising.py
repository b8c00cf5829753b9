"""What training feeds a generative head: the steps that do not count, and the times that are drawn."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.special import betaincinv
from torch import Tensor


def hold(actions: Float[Tensor, "B H A"], valid: Bool[Tensor, "B H"]) -> Float[Tensor, "B H A"]:
    """Chunks whose steps that are not valid repeat the last valid one (the first, before it; 0 if there is none).

    A network that mixes the steps of a chunk sees them all. So what stands in a step that does not count is made a
    function of those that do, and looks like what the data holds past the end of an episode.
    """
    B, H = valid.shape
    at = torch.where(valid, torch.arange(H, device=valid.device), -1).cummax(dim=1).values
    at = torch.where(at < 0, valid.to(torch.uint8).argmax(dim=1, keepdim=True), at)
    held = actions[torch.arange(B, device=valid.device)[:, None], at]
    return torch.where(valid.any(dim=1)[:, None, None], held, 0)


def beta_times(B: int, alpha: float, beta: float, cutoff: float, rng: torch.Generator) -> Float[Tensor, " B"]:
    """Flow times tau = cutoff (1 - b), b ~ Beta(alpha, beta), on the device of ``rng``.

    Drawn by inverting the distribution function at one uniform number each: b = u^(1 / alpha) for beta = 1, else the
    inverse of the regularised incomplete beta function in float64 on the CPU. alpha > 1 with beta = 1 puts most times
    near 0, the noise. Source: pi0 (arXiv 2410.24164, appendix B), whose code draws 1 - tau.
    """
    u = torch.rand(B, generator=rng, device=rng.device)
    if beta == 1:
        return cutoff * (1 - u ** (1 / alpha))
    b = betaincinv(alpha, beta, u.cpu().numpy().astype(np.float64))
    return torch.from_numpy(cutoff * (1 - b)).to(u)
