"""The residual MLP over readout tokens: what it reads, a second writing of Octo's formulas, and its refusals."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import network_tools as tools
from vola.errors import ConfigError, InputError
from vola.model.decoders import CrossAttention
from vola.model.readout import ReadoutMLP, ReadoutNetwork

CONFIG = ReadoutMLP(readouts=2, width=16, blocks=2, time_width=8)
CASES = {
    "regression": tools.PORTS,
    "logits": replace(tools.PORTS, out=12),
    "flow": replace(tools.PORTS, time=True, noise=True),
    "per_step": replace(tools.PORTS, time=True, noise=True, per_step_time=True),
    "latent": replace(tools.PORTS, latent=4),
    "everything": replace(tools.PORTS, time=True, noise=True, latent=4, out=5),
}
cases = pytest.mark.parametrize("ports", CASES.values(), ids=CASES)


@cases
def test_reads_what_it_should_and_nothing_else(ports) -> None:
    tools.check_reads(ReadoutNetwork, CONFIG, ports)


@cases
def test_gradients_reach_every_weight(ports) -> None:
    tools.check_gradients(ReadoutNetwork, CONFIG, ports)


@cases
def test_starts_at_zero(ports) -> None:
    tools.check_starts_at_zero(ReadoutNetwork, CONFIG, ports)


@cases
def test_M13_a_sample_alone_equals_itself_in_a_batch(ports) -> None:
    tools.check_single_is_batched(ReadoutNetwork, CONFIG, ports)


@cases
def test_autocast(ports) -> None:
    tools.check_autocast(ReadoutNetwork, CONFIG, ports)


def test_formulas_of_octo_written_a_second_time() -> None:
    """Every number of one sample, from the weights, with no shared code."""
    ports = CASES["everything"]
    network = tools.build(ReadoutNetwork, CONFIG, ports).double()
    context, (x, tau, latent) = tools.backbone(CONFIG)(tools.inputs()), tools.arguments(ports)
    assert tau is not None
    assert latent is not None
    w = {k: v.detach() for k, v in network.named_parameters()}

    def swish(v: Tensor) -> Tensor:
        return v / (1 + torch.exp(-v))

    def dense(name: str, v: Tensor) -> Tensor:
        return w[f"{name}.weight"] @ v + w[f"{name}.bias"]

    b, t = 1, (1 - tau[1].double()) * 20
    phases = [2 * math.pi * float(f) * float(t) for f in w["time.frequency"]]
    code = torch.tensor([math.cos(p) for p in phases] + [math.sin(p) for p in phases], dtype=torch.float64)
    code = dense("time.down", swish(dense("time.up", code)))
    mean = (context.readout[b, 0].double() + context.readout[b, 1].double()) / 2
    h = dense("enter", torch.cat([mean, x[b].double().reshape(-1), code, latent[b].double()]))
    for i in range(2):
        centred = h - h.mean()
        normed = centred / (centred.square().mean() + 1e-6).sqrt()
        normed = normed * w[f"blocks.{i}.norm.weight"] + w[f"blocks.{i}.norm.bias"]
        h = h + dense(f"blocks.{i}.down", swish(dense(f"blocks.{i}.up", normed)))
    expected = dense("leave", swish(h)).reshape(ports.H, ports.out)
    torch.testing.assert_close(network.float()(context, x, tau, latent)[b].double(), expected, rtol=1e-4, atol=1e-5)


def test_one_time_per_sample_is_the_same_time_at_every_step() -> None:
    ports = CASES["per_step"]
    network, context = tools.build(ReadoutNetwork, CONFIG, ports), tools.backbone(CONFIG)(tools.inputs())
    x, tau = tools.arguments(ports)[0], torch.tensor([0.1, 0.5, 0.9])
    with torch.no_grad():
        torch.testing.assert_close(network(context, x, tau), network(context, x, tau[:, None].expand(-1, ports.H)))


def test_order_of_readout_tokens_does_not_matter() -> None:
    ports = CASES["flow"]
    network, context = tools.build(ReadoutNetwork, CONFIG, ports), tools.backbone(CONFIG)(tools.inputs())
    flipped = tools.with_outputs(context, lambda o: torch.cat([o[:, :-2], o[:, -2:].flip(1)], dim=1))
    assert tools.moved(network, context, tools.arguments(ports), flipped) < 1e-6


@pytest.mark.parametrize(
    "setting", [{"readouts": 0}, {"width": 0}, {"blocks": 0}, {"time_width": 5}, {"time_steps": 0}]
)
def test_refused_settings(setting) -> None:
    with pytest.raises(ConfigError, match=f"expected .*{next(iter(setting))}"):
        ReadoutMLP(**setting)


def test_arguments_that_were_not_announced_are_refused() -> None:
    network = tools.build(ReadoutNetwork, CONFIG, CASES["flow"])
    context, (x, tau, _) = tools.backbone(CONFIG)(tools.inputs()), tools.arguments(CASES["flow"])
    with pytest.raises(InputError, match="expected a tau, got none"):
        network(context, x, None)
    with pytest.raises(InputError, match="expected no latent, got one"):
        network(context, x, tau, torch.zeros(3, 4))
    with pytest.raises(InputError, match=r"x: expected shape \(B H A\) with H=8, A=3, got \(3, 7, 3\)"):
        network(context, x[:, 1:], tau)
    with pytest.raises(InputError, match=r"tau: expected shape \(B\) with B=3, H=8, got \(3, 8\)"):
        network(context, x, torch.zeros(3, 8))


def test_a_context_without_readouts_is_refused() -> None:
    network, ports = tools.build(ReadoutNetwork, CONFIG, tools.PORTS), tools.PORTS
    context = tools.backbone(CrossAttention(width=8, heads=2))(tools.inputs())
    with pytest.raises(ConfigError, match="expected readout tokens, got none"):
        network(context, *tools.arguments(ports))
