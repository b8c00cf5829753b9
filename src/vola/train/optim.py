"""Optimiser, learning-rate schedule and the running average of weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import final

import torch
from torch import Tensor, nn

from vola.errors import CheckpointError
from vola.system import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """Rate of optimiser step ``step`` (from 0): linear warm-up, then cosine to ``final`` * lr at the last step.

    Counted in optimiser steps: accumulation, the number of processes and resuming do not change the curve.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.final + (1 - config.final) * cosine)


def make_optimiser(policy: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019); weight decay on matrices and kernels only, not on norms, biases, embeddings."""
    embeddings = {id(m.weight) for m in policy.modules() if isinstance(m, nn.Embedding)}
    decayed: list[Tensor] = []
    free: list[Tensor] = []
    for p in policy.parameters():
        (decayed if p.ndim >= 2 and id(p) not in embeddings else free).append(p)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate


def optimiser_tensors(policy: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's moments as ``<moment>/<weight name>``; empty before the first step."""
    return {
        f"{moment}/{name}": value
        for name, p in policy.named_parameters()
        for moment, value in optimiser.state.get(p, {}).items()
    }


def restore_optimiser(policy: nn.Module, optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put moments back.

    Raises:
        CheckpointError: the moments are of other weights.
    """
    expected = {f"{m}/{n}" for n, _ in policy.named_parameters() for m in ("step", "exp_avg", "exp_avg_sq")}
    if tensors and expected != set(tensors):
        odd = sorted(expected ^ set(tensors))
        raise CheckpointError(f"optimiser state: expected the moments of every weight, differs at {odd[:6]}")
    for name, p in policy.named_parameters():
        if tensors:
            optimiser.state[p] = {m: tensors[f"{m}/{name}"].clone() for m in ("step", "exp_avg", "exp_avg_sq")}


@final
class Average:
    """Exponential average of weights; the decay grows as (1 + step) / (10 + step) up to ``decay``.

    Source: Polyak averaging with the warm-up of TensorFlow's ExponentialMovingAverage.
    """

    def __init__(self, policy: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {k: v.detach().clone() for k, v in policy.state_dict().items()}

    @torch.no_grad()
    def update(self, policy: nn.Module, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        new = list(policy.state_dict().values())
        torch._foreach_lerp_(list(self.weights.values()), new, 1 - decay)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = {k: weights[k].clone() for k in self.weights}


def gradient_norm(parameters: Iterable[Tensor], clip: float) -> float:
    """Clip the global gradient norm to ``clip`` and return the norm before clipping."""
    return float(nn.utils.clip_grad_norm_(parameters, clip, foreach=True))
