"""A context without a backbone, and small networks with the signature of a head's network."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vola.heads.base import Head
from vola.model import layouts
from vola.model.backbone import Context, Inputs
from vola.model.language import WordEmbedding, WordEncoder
from vola.model.positions import NoPositions
from vola.model.trunk import Expert, ExpertConfig, Segment, TrunkConfig


def fake_context(B: int, S: int = 2) -> Context:
    """B observations that say nothing; the state is a different number for each sample."""
    trunk = TrunkConfig(1, 1, 1, 2, NoPositions())
    segment = Segment(Expert(trunk, ExpertConfig(2, 2)), ("text",), torch.zeros(B, 1, 2))
    state = torch.linspace(-1, 1, B)[:, None, None].expand(B, 1, S).clone()
    inputs = Inputs({}, {}, state, None, torch.zeros(B, 1, dtype=torch.long), None)
    language = WordEncoder(WordEmbedding(2), 4, 2)
    return Context(inputs, language, segment, layouts.observed(0, 1, 0), None, None)


class Oracle(nn.Module):
    """A network that is a formula of (x, tau)."""

    def __init__(self, formula: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, context: Context, x: Tensor, tau: Tensor | None, latent: Tensor | None = None) -> Tensor:
        assert tau is not None
        return self.formula(x, tau if tau.ndim == 2 else tau[:, None])


class Recorder(nn.Module):
    """Answers zero and keeps what it was fed."""

    def __init__(self) -> None:
        super().__init__()
        self.fed: list[tuple[Tensor, Tensor | None, Tensor | None]] = []

    def forward(self, context: Context, x: Tensor, tau: Tensor | None, latent: Tensor | None = None) -> Tensor:
        self.fed.append((x.clone(), tau, latent))
        return torch.zeros_like(x)


class Mlp(nn.Module):
    """Mixes all steps and dimensions of the chunk with the time (per sample or step) and the latent."""

    def __init__(self, H: int, A: int, width: int = 32, times: int = 1, latent: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.H, self.A, self.times = H, A, times
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = nn.Sequential(
                nn.Linear(H * A + 3 * times + latent, width),
                nn.SiLU(),
                nn.Linear(width, width),
                nn.SiLU(),
                nn.Linear(width, H * A),
            )

    def forward(self, context: Context, x: Tensor, tau: Tensor | None, latent: Tensor | None = None) -> Tensor:
        B = x.shape[0]
        t = torch.zeros(B, self.times).to(x) if tau is None else tau.to(x).view(B, self.times)
        parts = [x.flatten(1), t, (3 * t).sin(), (3 * t).cos()]
        if latent is not None:
            parts.append(latent)
        return self.body(torch.cat(parts, dim=1)).view(B, self.H, self.A)


def fit(head: Head, draw: Callable[[int], Tensor], steps: int, B: int = 256, lr: float = 5e-3) -> None:
    """Train on fresh chunks ``B H A`` of ``draw(step)``, all valid; the rate falls linearly to 0."""
    optimiser = torch.optim.Adam(head.parameters(), lr=lr)
    rng = torch.Generator().manual_seed(1)
    context = fake_context(B)
    for i in range(steps):
        optimiser.param_groups[0]["lr"] = lr * (1 - i / steps)
        actions = draw(i)
        loss = head.loss(context, actions, torch.ones(actions.shape[:2], dtype=torch.bool), rng).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def check_invalid_steps_do_nothing(head: Head, H: int, A: int) -> None:
    """Losses and gradients stay bit for bit whatever stands in steps that are not valid, or in other samples."""
    valid = torch.tensor([[True] * H, [True] * (H - 2) + [False] * 2, [False] + [True] * (H - 1), [False] * H])
    actions = torch.randn(4, H, A, generator=torch.Generator().manual_seed(2))

    def run(chunks: Tensor) -> tuple[dict[str, Tensor], list[Tensor]]:
        loss = head.loss(fake_context(4), chunks, valid, torch.Generator().manual_seed(3))
        head.zero_grad()
        loss.mean().backward()
        counted = {k: torch.where(p.valid, p.values, 0).detach() for k, p in loss.parts.items()}
        return counted, [p.grad.clone() for p in head.parameters() if p.grad is not None]

    base, gradients = run(actions)
    assert gradients
    for poison in (1e9, float("nan"), float("-inf")):
        values, other = run(torch.where(valid[..., None], actions, poison))
        assert all(torch.equal(base[k], values[k]) for k in base)
        assert all(torch.equal(a, b) for a, b in zip(gradients, other, strict=True))
    assert all(bool(torch.isfinite(g).all()) for g in gradients)
    assert all((v[3] == 0).all() for v in base.values())  # no valid step: nothing counts
    changed = actions.clone()
    changed[0] += 1
    values, _ = run(changed)
    for k, v in values.items():
        torch.testing.assert_close(v[1:], base[k][1:], atol=1e-6, rtol=1e-6)
        assert not torch.equal(v[0], base[k][0])
