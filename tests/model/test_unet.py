"""The conditional 1-D UNet: parity with LeRobot's Diffusion Policy, horizons and groups, and what it must refuse.

``tests/golden/diffusion_unet`` are weights and outputs of a randomly initialised reference model (its ``spec.json``
says which), here at the integer times of that model: tau = 1 - t / 100.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import network_tools as tools
from vola.errors import ConfigError, InputError
from vola.model.backbone import Context
from vola.model.conditioning import index_code, noise_index
from vola.model.unet import ConditionalUnet1d, Unet1d

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "diffusion_unet"
CONFIG = Unet1d(channels=(8, 16), readouts=2, kernel=3, groups=4, final_groups=4, step_width=8)
FLOW = replace(tools.PORTS, time=True, noise=True)
CASES = {
    "flow": (CONFIG, FLOW),
    "bias": (replace(CONFIG, film="bias"), FLOW),
    "no_time": (CONFIG, replace(FLOW, time=False)),
    "everything": (replace(CONFIG, channels=(8, 8, 16)), replace(FLOW, latent=4, out=5)),
    "one_level": (replace(CONFIG, channels=(8,)), FLOW),
}
cases = pytest.mark.parametrize(("config", "ports"), CASES.values(), ids=CASES)


@cases
def test_reads_what_it_should_and_nothing_else(config, ports) -> None:
    tools.check_reads(ConditionalUnet1d, config, ports)


@cases
def test_gradients_reach_every_weight(config, ports) -> None:
    tools.check_gradients(ConditionalUnet1d, config, ports)


@cases
def test_starts_at_zero(config, ports) -> None:
    tools.check_starts_at_zero(ConditionalUnet1d, config, ports)


@cases
def test_M13_a_sample_alone_equals_itself_in_a_batch(config, ports) -> None:
    tools.check_single_is_batched(ConditionalUnet1d, config, ports)


@cases
def test_autocast(config, ports) -> None:
    tools.check_autocast(ConditionalUnet1d, config, ports)


def test_order_of_readout_tokens_matters() -> None:
    """They are joined, not averaged: each says its own thing."""
    network, context = tools.build(ConditionalUnet1d, CONFIG, FLOW), tools.backbone(CONFIG)(tools.inputs())
    flipped = tools.with_outputs(context, lambda o: torch.cat([o[:, :-2], o[:, -2:].flip(1)], dim=1))
    assert tools.moved(network, context, tools.arguments(FLOW), flipped) > 1e-3


def rename(name: str) -> str:
    """Our name of a weight -> LeRobot's."""
    place, _, rest = name.partition(".")
    block = {"first.conv": "conv1.block.0", "first.norm": "conv1.block.1", "second.conv": "conv2.block.0"}
    block |= {"second.norm": "conv2.block.1", "film": "cond_encoder.1", "skip": "residual_conv"}
    for ours, theirs in block.items():
        rest = rest.replace(f".{ours}.", f".{theirs}.")
    if place in ("shrink", "grow"):
        level, kind = rest.split(".")
        return f"{'down' if place == 'shrink' else 'up'}_modules.{level}.2.{kind}"
    fixed = {"time_up": "diffusion_step_encoder.1", "time_down": "diffusion_step_encoder.3", "leave": "final_conv.1"}
    fixed |= {"down": "down_modules", "middle": "mid_modules", "up": "up_modules"}
    if place == "last":
        return "final_conv.0." + rest.replace("conv", "block.0").replace("norm", "block.1")
    return f"{fixed[place]}.{rest}"


def lerobot() -> tuple[ConditionalUnet1d, Mapping[str, Tensor]]:
    weights, c = load_file(GOLDEN / "weights.safetensors"), json.loads((GOLDEN / "spec.json").read_text())["config"]
    config = Unet1d(tuple(c["down"]), 1, c["k"], c["groups"], 8, c["step"], "scale_and_bias", c["train_steps"])
    ports = replace(FLOW, H=c["horizon"], A=c["ad"], out=c["ad"], width=c["n_obs"] * (c["sd"] + c["ed"]))
    net = ConditionalUnet1d(config, ports)
    theirs = {rename(name): p for name, p in net.named_parameters()}
    assert {f"diffusion.unet.{name}" for name in theirs} == set(weights)
    with torch.no_grad():
        for name, p in theirs.items():
            assert p.shape == weights[f"diffusion.unet.{name}"].shape, name
            p.copy_(weights[f"diffusion.unet.{name}"])
    return net, load_file(GOLDEN / "io.safetensors")


def observing(condition: Tensor) -> Context:
    """A context whose one readout token is the reference's global condition."""
    config = replace(CONFIG, readouts=1)
    context = tools.backbone(config)(tools.inputs(len(condition)))
    assert context.outputs is not None
    outputs = torch.zeros(*context.outputs.shape[:2], condition.shape[1])
    outputs[:, -1] = condition
    return replace(context, outputs=outputs)


def assert_golden(got: Tensor, name: str, io: Mapping[str, Tensor]) -> None:
    tolerance = json.loads((GOLDEN / "spec.json").read_text())["tensors"][name]
    torch.testing.assert_close(got, io[name], atol=tolerance["atol"], rtol=tolerance["rtol"])


def test_golden_unet_of_lerobot() -> None:
    net, io = lerobot()
    seen: list[Tensor] = []
    hook = net.down[0][0].register_forward_hook(lambda m, given, out: seen.append(out))
    tau = 1 - io["input.t"] / 100
    with torch.no_grad():
        predicted = net(observing(io["intermediate.global_cond"]), io["input.x_t"], tau)
        embedded = net.embed_time(io["input.t"].float())
    hook.remove()
    assert_golden(index_code(io["input.t"].float(), 32), "intermediate.time_code", io)
    assert_golden(embedded, "intermediate.time_embedding", io)
    assert_golden(seen[0], "intermediate.down0_block0", io)
    assert_golden(predicted, "expected.noise_prediction", io)


def test_time_runs_from_noise_to_data() -> None:
    """tau = 0 is noise, the reference's largest index; every whole index is met to float32's accuracy."""
    t = torch.arange(101.0)
    torch.testing.assert_close(noise_index(1 - t / 100, 100), t, rtol=0, atol=1e-5)


def test_film_without_a_scale_only_adds() -> None:
    """The first block by hand: convolution, + bias of the condition, convolution, + 1x1 skip."""
    config = replace(CONFIG, film="bias")
    net, (x, tau, _) = tools.build(ConditionalUnet1d, config, FLOW), tools.arguments(FLOW)
    context, block = tools.backbone(config)(tools.inputs()), net.down[0][0]
    with torch.no_grad():
        c = nn.functional.mish(net.condition(context, tau, None))
        expected = block.second(block.first(x.mT) + block.film(c)[..., None]) + block.skip(x.mT)
        assert torch.equal(block(x.mT, c), expected)
        assert block.film.out_features * 2 == tools.build(ConditionalUnet1d, CONFIG, FLOW).down[0][0].film.out_features


@pytest.mark.parametrize("H", [1, 2, 3, 7, 25, 50, 64])
@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("readouts", [1, 2])
def test_M12_every_horizon_works_or_is_refused_with_valid_ones(H: int, levels: int, readouts: int) -> None:
    config = replace(CONFIG, channels=(8, 16, 16)[:levels], readouts=readouts)
    ports = replace(FLOW, H=H)
    if H % 2 ** (levels - 1):
        below, above = H - H % config.shrink, H - H % config.shrink + config.shrink
        said = f"got H={H}. Use H={f'{below} or {above}' if below else above}, or fewer channels"
        with pytest.raises(ConfigError, match=said):
            config.check(ports)
        with pytest.raises(ConfigError, match=said):
            ConditionalUnet1d(config, ports)
        for fine in {below, above} - {0}:
            config.check(replace(ports, H=fine))
        return
    net, (x, tau, _) = tools.build(ConditionalUnet1d, config, ports), tools.arguments(ports)
    out = net(tools.backbone(config)(tools.inputs()), x, tau)
    assert out.shape == (3, H, 3)
    out.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_a_group_of_one_number_is_refused() -> None:
    """Its norm would turn the only number into zero, whatever it was."""
    wide = replace(CONFIG, channels=(8, 16), groups=8, final_groups=8)
    wide.check(replace(FLOW, H=2))
    with pytest.raises(ConfigError, match="8 channels in 8 groups over 1 step leave one number per group"):
        replace(wide, channels=(8,)).check(replace(FLOW, H=1))
    with pytest.raises(ConfigError, match="16 channels in 16 groups over 1 step"):
        replace(wide, channels=(16, 16), groups=16).check(replace(FLOW, H=2))


@pytest.mark.parametrize(("channels", "radius"), [((8,), 9), ((8, 16), 31)])
def test_zeros_give_the_same_action_at_every_step(channels: tuple[int, ...], radius: int) -> None:
    """The claim behind the refusal: fed with zeros, steps far from both ends repeat with the period of the strides.

    ``radius`` is how far the ends' padding is felt. With noisy actions the same steps differ.
    """
    config = replace(CONFIG, channels=channels)
    ports = replace(FLOW, H=96)
    net, context = tools.build(ConditionalUnet1d, config, ports), tools.backbone(config)(tools.inputs())
    x, tau, _ = tools.arguments(ports)
    period, inner = config.shrink, slice(radius, 96 - radius)
    with torch.no_grad():
        silent = net(context, torch.zeros_like(x), tau)[:, inner]
        torch.testing.assert_close(silent[:, :-period], silent[:, period:], rtol=0, atol=1e-5)
        told = net(context, x, tau)[:, inner]
    assert (told[:, :-period] - told[:, period:]).abs().mean() > 0.1
    assert (silent[0] - silent[1]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("ports", "said"),
    [
        (replace(FLOW, noise=False, time=False), "feeds zeros: it would give nearly the same action at every step"),
        (replace(FLOW, noise=False, time=False, latent=4), "feeds zeros"),
        (replace(FLOW, per_step_time=True), "a time per step of the chunk and the UNet takes one per sample"),
    ],
)
def test_refused_rules(ports, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CONFIG.check(ports)
    with pytest.raises(ConfigError, match=said):
        ConditionalUnet1d(CONFIG, ports)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"channels": ()}, "channels of at least one level"),
        ({"channels": (8, 0)}, r"channels\[1\] >= 1"),
        ({"kernel": 4}, "odd kernel"),
        ({"step_width": 7}, "even step_width"),
        ({"step_width": 2}, "even step_width >= 4"),
        ({"groups": 3}, "groups=3 and 8 channels"),
        ({"groups": 8, "channels": (8, 12)}, "groups=8 and 12 channels"),
        ({"final_groups": 5}, "final_groups=5 and 8 channels"),
        ({"readouts": 0}, "readouts >= 1"),
        ({"film": "scale"}, "'scale_and_bias' or 'bias', got 'scale'"),
        ({"time_steps": 0}, "time_steps >= 1"),
    ],
)
def test_refused_settings(setting: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(CONFIG, **setting)


def test_arguments_that_were_not_announced_are_refused() -> None:
    net, context = tools.build(ConditionalUnet1d, CONFIG, FLOW), tools.backbone(CONFIG)(tools.inputs())
    x, tau, _ = tools.arguments(FLOW)
    with pytest.raises(InputError, match="expected a tau, got none"):
        net(context, x, None)
    with pytest.raises(InputError, match="expected no latent, got one"):
        net(context, x, tau, torch.zeros(3, 1))


@pytest.mark.parametrize(("t", "width"), [(0.0, 4), (99.0, 8)])
def test_time_code_has_even_widths_only(t: float, width: int) -> None:
    code = index_code(torch.tensor(t), width)
    assert code.shape == (width,)
    assert float(code[0]) == pytest.approx(float(torch.tensor(t).sin()))
    with pytest.raises(ConfigError, match="even width >= 4"):
        index_code(torch.tensor(t), width - 1)
