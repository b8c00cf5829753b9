"""Contexts at size 8 and the questions that every network outside the trunk is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vola.model.backbone import Backbone, BackboneConfig, Context, Inputs
from vola.model.language import WordEmbedding
from vola.model.networks import Ports
from vola.model.positions import Rotary
from vola.model.trunk import ExpertConfig, TrunkConfig
from vola.model.vision import ConvStem

TRUNK = TrunkConfig(depth=2, heads=2, kv_heads=1, head_dim=4, positions=Rotary())
BACKBONE = BackboneConfig(
    ConvStem(channels=4, patch=4, merge=2, features=4, tokens=2), WordEmbedding(8), ExpertConfig(8, 16)
)
PORTS = Ports(TRUNK, width=8, H=8, A=3, out=3)
WORDS = 4

Make = Callable[[Any, Ports], nn.Module]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def awake(module: nn.Module, seed: int = 1) -> nn.Module:
    """Every weight away from its initial value, zero-initialised ones included."""
    rng = seeded(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=rng))
    return module


def build(make: Make, config: Any, ports: Ports, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return awake(make(config, ports))


def backbone(config: Any, seed: int = 0) -> Backbone:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Backbone(BACKBONE, TRUNK, ("top",), (8, 8), 3, 1, 9, config.reader(PORTS.H))
        awake(made)
    return made


def inputs(B: int = 3, words: int = WORDS, seed: int = 0) -> Inputs:
    """Sample b has ``words`` - b % 2 words; the images of sample 2 are missing."""
    rng = seeded(seed)
    seen = torch.ones(B, 1, dtype=torch.bool)
    seen[2:] = False
    spoken = torch.arange(words) < (words - torch.arange(B) % 2)[:, None]
    ids = torch.randint(2, 9, (B, words), generator=rng).masked_fill(~spoken, 0)
    return Inputs(
        {"top": torch.randn(B, 1, 3, 8, 8, generator=rng)},
        {"top": seen},
        torch.randn(B, 1, 3, generator=rng),
        None,
        ids,
        spoken,
    )


def rows(given: Inputs, chosen: slice, words: int) -> Inputs:
    """Some samples of a batch, with the first ``words`` words only."""
    return Inputs(
        {k: v[chosen] for k, v in given.images.items()},
        {k: None if v is None else v[chosen] for k, v in given.images_valid.items()},
        given.state[chosen],
        None,
        given.words[chosen, :words],
        None if given.words_valid is None else given.words_valid[chosen, :words],
    )


def arguments(ports: Ports, B: int = 3, seed: int = 3) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x, tau and latent as the ports announce them; x is zeros for a rule that feeds none."""
    rng = seeded(seed)
    x = torch.randn(B, ports.H, ports.A, generator=rng) if ports.noise else torch.zeros(B, ports.H, ports.A)
    tau = torch.rand(B, *([ports.H] if ports.per_step_time else []), generator=rng) if ports.time else None
    return x, tau, torch.randn(B, ports.latent, generator=rng) if ports.latent else None


def moved(network: nn.Module, context: Context, given: tuple[Tensor | None, ...], other: Any) -> float:
    """Largest change of the output when the context, or x, tau and latent, are replaced by ``other``."""
    with torch.no_grad():
        before = network(context, *given)
        after = network(other, *given) if isinstance(other, Context) else network(context, *other)
    return float((before - after).abs().max())


def with_outputs(context: Context, change: Callable[[Tensor], Tensor]) -> Context:
    assert context.outputs is not None
    return replace(context, outputs=change(context.outputs.clone()))


def check_reads(make: Make, config: Any, ports: Ports) -> None:
    """Invalid tokens and other samples change nothing; everything that was plugged in changes something."""
    network, context, given = build(make, config, ports), backbone(config)(inputs()), arguments(ports)
    valid, n = context.segment.valid, context.readouts
    assert valid is not None
    assert not valid.all()

    def poison(outputs: Tensor) -> Tensor:
        outputs[~valid] = 1e3
        return outputs

    assert moved(network, context, given, with_outputs(context, poison)) == 0.0

    def spoil(outputs: Tensor) -> Tensor:
        outputs[1:] = -7.0
        return outputs

    spoiled = tuple(None if v is None else torch.cat([v[:1], 0.5 - v[1:]]) for v in given)
    with torch.no_grad():
        alone = network(context, *given)[0]
        torch.testing.assert_close(network(with_outputs(context, spoil), *spoiled)[0], alone, rtol=0, atol=1e-6)

    for i in [*range(context.memory.shape[1])] if not n else [*range(-n, 0)]:
        where = valid[:, i].nonzero()[0]

        def nudge(outputs: Tensor, i: int = i, where: Tensor = where) -> Tensor:
            outputs[where, i] += torch.linspace(-1, 1, outputs.shape[-1])
            return outputs

        assert moved(network, context, given, with_outputs(context, nudge)) > 1e-5, i
    for i, value in enumerate(given):
        if value is None or (i == 0 and not ports.noise):
            continue
        for place in range(value[0].numel()):
            changed = value.clone()
            changed.view(len(value), -1)[0, place] += 0.3
            assert moved(network, context, given, (*given[:i], changed, *given[i + 1 :])) > 1e-6, (i, place)


def check_gradients(make: Make, config: Any, ports: Ports, dead: tuple[str, ...] = ()) -> None:
    """A training step reaches every weight of the network and of the backbone, except those named ``dead``."""
    network, eyes = build(make, config, ports), backbone(config)
    out = network(eyes(inputs()), *arguments(ports))
    assert out.shape == (3, ports.H, ports.out)
    out.square().sum().backward()
    for name, p in network.named_parameters():
        got = 0.0 if p.grad is None else float(p.grad.abs().max())
        assert (got > 0) != (name in dead), name
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in eyes.parameters())


def check_starts_at_zero(make: Make, config: Any, ports: Ports) -> None:
    with torch.no_grad():
        assert not make(config, ports)(backbone(config)(inputs()), *arguments(ports)).any()


def check_single_is_batched(make: Make, config: Any, ports: Ports) -> None:
    """Each sample alone, without the padding that its longer mates force on it."""
    network, eyes, together, given = build(make, config, ports), backbone(config), inputs(4), arguments(ports, 4)
    with torch.no_grad():
        batched = network(eyes(together), *given)
        for b in range(4):
            one = slice(b, b + 1)
            alone = network(eyes(rows(together, one, WORDS - b % 2)), *(None if v is None else v[one] for v in given))
            torch.testing.assert_close(alone, batched[one], rtol=1e-5, atol=1e-5)


def check_autocast(make: Make, config: Any, ports: Ports) -> None:
    """bf16 autocast gives float32's numbers to bf16's accuracy, and finite gradients."""
    network, eyes, given = build(make, config, ports), backbone(config), arguments(ports)
    with torch.no_grad():
        exact = network(eyes(inputs()), *given)
    with torch.autocast("cpu", torch.bfloat16):
        rough = network(eyes(inputs()), *given)
    assert rough.dtype is torch.bfloat16
    rough.float().square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in network.parameters())
    error = (rough.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 0.05
