"""How much of the machine a training step uses: counted FLOPs over the fastest matrix product this process reaches."""

from __future__ import annotations

import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from vola.policy import Policy
from vola.types import Batch


def step_flops(policy: Policy, batch: Batch) -> int:
    """FLOPs (2 per multiply-add) of matrix products, convolutions and attention in one forward and backward pass."""
    rng = torch.Generator(policy.device).manual_seed(0)
    with FlopCounterMode(display=False) as counter:
        policy.loss(batch, rng).mean().backward()
    policy.zero_grad(set_to_none=True)
    return counter.get_total_flops()


def peak_flops(seconds: float = 0.3, n: int = 768) -> float:
    """FLOP/s of the best fp32 n x n matrix product within ``seconds``, with the threads of this process."""
    a, b = torch.randn(n, n), torch.randn(n, n)
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best
