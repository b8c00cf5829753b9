"""What all token heads share: cross-entropy over a sequence, and writing it token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from vola.errors import ConfigError
from vola.model.backbone import Context
from vola.model.token_networks import TokenNetwork
from vola.tokenizers.actions import Tokens

Pick: TypeAlias = Literal["sample", "argmax"]


def check_pick(head: str, pick: Pick, temperature: float) -> None:
    """Raises ConfigError for another word, or a temperature that is not positive."""
    if pick not in ("sample", "argmax"):
        raise ConfigError(f"{head}: expected pick 'sample' or 'argmax', got {pick!r}")
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"{head}: expected a temperature > 0, got {temperature}. For the likeliest token: argmax.")


def cross_entropy(scores: Float[Tensor, "B L V"], ids: Int64[Tensor, "B L"]) -> Float[Tensor, "B L"]:
    """-log softmax(scores) at the ids (nats), in float32."""
    return F.cross_entropy(scores.float().flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape)


def pick_ids(
    scores: Float[Tensor, "*rows K"], pick: Pick, temperature: float, uniform: Float[Tensor, "*rows"] | None
) -> Int64[Tensor, "*rows"]:
    """One id per row of scores: the largest, or by inverting the distribution function at ``uniform`` in [0, 1)."""
    if pick == "argmax":
        return scores.argmax(-1)
    if uniform is None:
        raise ConfigError("tokens: expected uniform numbers to sample with, got None")
    reached = (scores.double() / temperature).softmax(-1).cumsum(-1)
    return (reached < uniform[..., None] * reached[..., -1:]).sum(-1).clamp(max=scores.shape[-1] - 1)


def write(
    network: TokenNetwork,
    context: Context,
    rngs: Sequence[np.random.Generator],
    pick: Pick,
    temperature: float,
    end: int | None,
) -> Tokens:
    """Write one sequence per sample until ``end`` (kept, and counted as valid) or the network's length.

    Sample b uses ``rngs[b]`` alone, one number per token, and does not depend on when the others end.
    """
    state = network.begin(context)
    device = state.ids.device
    open_ = torch.ones(context.size, dtype=torch.bool, device=device)
    valid = []
    for _ in range(network.length):
        scores, state = network.step(context, state)
        uniform = None
        if pick == "sample":
            uniform = torch.tensor([g.random() for g in rngs], dtype=torch.float64, device=device)
        ids = pick_ids(network.choices(scores), pick, temperature, uniform)
        ids = torch.where(open_, ids, 0)
        state = network.append(state, ids)
        valid.append(open_)
        if end is not None:
            open_ = open_ & (ids != end)
            if not open_.any():
                break
    return Tokens(state.ids.cpu().numpy(), torch.stack(valid, dim=1).cpu().numpy())
