"""Cross-attention and DETR decoders: what they read, who sees whom, parity with LeRobot's ACT, and their refusals.

``tests/golden/act/transformer.safetensors`` holds weights and outputs of a randomly initialised reference model
(LeRobot 0.6.1, ``ACTPolicy``; tolerances are in its metadata).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import network_tools as tools
from vola.errors import ConfigError, InputError
from vola.model.decoders import CrossAttention, CrossAttentionDecoder, Detr, DetrDecoder, decoder_layout

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "act" / "transformer.safetensors"
CROSS = CrossAttention(width=8, layers=2, heads=2, hidden=16)
DETR = Detr(width=8, encoder=1, decoder=2, heads=2, hidden=16)
NETWORKS = {
    "cross": (CrossAttentionDecoder, CROSS),
    "causal": (CrossAttentionDecoder, replace(CROSS, causal=True)),
    "detr": (DetrDecoder, DETR),
    "detr_no_encoder": (DetrDecoder, replace(DETR, encoder=0, decoder=1)),
}
PORTS = {
    "regression": tools.PORTS,
    "logits": replace(tools.PORTS, out=12),
    "flow": replace(tools.PORTS, time=True, noise=True),
    "per_step": replace(tools.PORTS, time=True, noise=True, per_step_time=True),
    "latent": replace(tools.PORTS, latent=4),
    "everything": replace(tools.PORTS, time=True, noise=True, latent=4, out=5),
}
networks = pytest.mark.parametrize(("make", "config"), NETWORKS.values(), ids=NETWORKS)
pairs = pytest.mark.parametrize(
    ("make", "config", "ports"),
    [(*network, ports) for network in NETWORKS.values() for ports in PORTS.values()],
    ids=[f"{a}-{b}" for a in NETWORKS for b in PORTS],
)


@pairs
def test_reads_what_it_should_and_nothing_else(make, config, ports) -> None:
    tools.check_reads(make, config, ports)


@pairs
def test_gradients_reach_every_weight(make, config, ports) -> None:
    """ACT's first self-attention runs over zeros: with values that are all alike, nothing moves its softmax."""
    blind = isinstance(config, Detr) and not (ports.noise or ports.time)
    names = [f"decoder.0.self_attention.{part}" for part in ("q.weight", "q.bias", "k.weight", "v.weight")]
    # Softmax does not see what is added to all scores of a row.
    shifts = [name for name, _ in make(config, ports).named_parameters() if name.endswith("attention.k.bias")]
    network, eyes = tools.build(make, config, ports), tools.backbone(config)
    out = network(eyes(tools.inputs()), *tools.arguments(ports))
    assert out.shape == (3, ports.H, ports.out)
    out.square().sum().backward()
    largest = {n: 0.0 if p.grad is None else float(p.grad.abs().max()) for n, p in network.named_parameters()}
    top = max(largest.values())
    still = {name for name, size in largest.items() if size < 1e-7 * top}
    assert still <= {*shifts, *(names if blind else [])}
    assert set(names) <= still or not blind
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in eyes.parameters())


@pairs
def test_starts_at_zero(make, config, ports) -> None:
    tools.check_starts_at_zero(make, config, ports)


@pairs
def test_M13_a_sample_alone_equals_itself_in_a_batch(make, config, ports) -> None:
    tools.check_single_is_batched(make, config, ports)


@networks
def test_autocast(make, config) -> None:
    tools.check_autocast(make, config, PORTS["everything"])


@networks
def test_reference_backend_gives_the_same(make, config) -> None:
    ports = PORTS["everything"]
    slow = replace(ports, trunk=replace(ports.trunk, backend="reference"))
    context, given = tools.backbone(config)(tools.inputs()), tools.arguments(ports)
    with torch.no_grad():
        a, b = (tools.build(make, config, p)(context, *given) for p in (ports, slow))
    torch.testing.assert_close(a, b)


@networks
def test_memory_that_is_all_invalid_gives_finite_numbers(make, config) -> None:
    ports = PORTS["regression"]
    given = tools.inputs()
    blind = replace(given, words_valid=torch.zeros_like(given.words_valid))
    context = tools.backbone(config)(blind)
    context = replace(context, segment=replace(context.segment, valid=torch.zeros_like(context.segment.valid)))
    out = tools.build(make, config, ports)(context, *tools.arguments(ports))
    out.sum().backward()
    assert out.isfinite().all()
    assert torch.equal(out[0], out[1])


@pytest.mark.parametrize("name", ["cross", "detr"])
def test_memory_is_a_set(name: str) -> None:
    """Tokens carry their place themselves: their order in the memory says nothing."""
    make, config = NETWORKS[name]
    ports = PORTS["everything"]
    context = tools.backbone(config)(tools.inputs())
    turned = tools.with_outputs(context, lambda o: o.flip(1))
    turned = replace(turned, segment=replace(turned.segment, valid=context.segment.valid.flip(1)))
    assert tools.moved(tools.build(make, config, ports), context, tools.arguments(ports), turned) < 1e-5


@pytest.mark.parametrize(("name", "later"), [("causal", 0.0), ("cross", None), ("detr", None)])
def test_who_sees_whom_inside_the_chunk(name: str, later: float | None) -> None:
    """Step h of a causal decoder moves steps h, h + 1, ... only; of a full one, all."""
    make, config = NETWORKS[name]
    ports = PORTS["flow"]
    network, context = tools.build(make, config, ports), tools.backbone(config)(tools.inputs())
    x, tau, _ = tools.arguments(ports)
    for h in range(ports.H):
        other = x.clone()
        other[:, h] += 1.0
        with torch.no_grad():
            change = (network(context, other, tau) - network(context, x, tau)).abs().amax(dim=(0, 2))
        assert (change[h:] > 1e-6).all()
        if later is None:
            assert (change[:h] > 1e-6).all()
        else:
            assert (change[:h] == 0.0).all()


@pytest.mark.parametrize(("name", "later"), [("causal", True), ("cross", False)])
def test_a_time_per_step_belongs_to_that_step(name: str, later: bool) -> None:
    make, config = NETWORKS[name]
    ports = PORTS["per_step"]
    network, context = tools.build(make, config, ports), tools.backbone(config)(tools.inputs())
    x, tau, _ = tools.arguments(ports)
    other = tau.clone()
    other[:, 5] = 1 - other[:, 5]
    with torch.no_grad():
        change = (network(context, x, other) - network(context, x, tau)).abs().amax(dim=(0, 2))
        assert (change[5:] > 1e-6).all()
        assert (change[:5] == 0.0).all() == later
        same = network(context, x, tau[:, :1].expand(-1, ports.H))
        torch.testing.assert_close(network(context, x, tau[:, 0]), same)


@pytest.mark.parametrize("causal", [False, True])
def test_layout(causal: bool) -> None:
    layout = decoder_layout(1, 3, 2, 4, causal)
    assert layout.cacheable("latent", "memory", "time")
    assert not layout.reaches("memory", "action")
    expected = torch.zeros(10, 10, dtype=torch.bool)
    expected[:, :6] = True
    expected[6:, 6:] = torch.ones(4, 4).tril().bool() if causal else True
    assert torch.equal(layout.dense(), expected)


def test_pre_norm_layer_written_a_second_time_with_torch() -> None:
    """The formulas with torch's own multi-head attention: one layer, a latent, a time token, causal."""
    config, ports = replace(CROSS, layers=1, causal=True), PORTS["everything"]
    net = tools.build(CrossAttentionDecoder, config, ports)
    context, (x, tau, latent) = tools.backbone(config)(tools.inputs()), tools.arguments(ports)
    layer = net.layers[0]

    def heads(q: Tensor, k: Tensor, part: nn.Module, **masks: Tensor) -> Tensor:
        made = nn.MultiheadAttention(8, 2, batch_first=True)
        made.in_proj_weight.copy_(torch.cat([part.q.weight, part.k.weight, part.v.weight]))
        made.in_proj_bias.copy_(torch.cat([part.q.bias, part.k.bias, part.v.bias]))
        made.out_proj.load_state_dict(part.out.state_dict())
        return made(q, k, k, need_weights=False, **masks)[0]

    with torch.no_grad():
        periods = 4e-3 * 1000 ** (torch.arange(4) / 3)
        angle = 2 * math.pi * tau[:, None] / periods
        code = torch.cat([angle.sin(), angle.cos()], dim=1)
        memory = torch.cat([net.memory(context.memory), net.time.down(F.silu(net.time.up(code)))[:, None]], dim=1)
        h = net.enter(x) + net.step + net.latent(latent)[:, None]
        padded = F.pad(~context.memory_valid, (0, 1))
        y = layer.self_norm(h)
        h = h + heads(y, y, layer.self_attention, attn_mask=torch.ones(8, 8).triu(1).bool())
        h = h + heads(layer.cross_norm(h), memory, layer.cross_attention, key_padding_mask=padded)
        y = F.gelu(layer.ffn.up(layer.ffn_norm(h)), approximate="tanh")
        expected = net.leave(net.norm(h + layer.ffn.down(y)))
        torch.testing.assert_close(net(context, x, tau, latent), expected, rtol=1e-4, atol=1e-5)


def fill(target: nn.Module, weights: Mapping[str, Tensor], at: str) -> None:
    """Copy one layer of LeRobot's ACT; a decoder's norm1, 2, 3 follow self-attention, cross-attention, FFN."""
    cross = hasattr(target, "cross_attention")
    parts = {"self_attention": "self_attn"} | ({"cross_attention": "multihead_attn"} if cross else {})
    for ours, theirs in parts.items():
        attention = getattr(target, ours)
        for kind in ("weight", "bias"):
            for name, value in zip("qkv", weights[f"{at}.{theirs}.in_proj_{kind}"].chunk(3), strict=True):
                getattr(getattr(attention, name), kind).copy_(value)
            getattr(attention.out, kind).copy_(weights[f"{at}.{theirs}.out_proj.{kind}"])
    norms = ["self_norm", *(["cross_norm"] if cross else []), "ffn_norm"]
    names = {"up": "linear1", "down": "linear2"} | {ours: f"norm{i + 1}" for i, ours in enumerate(norms)}
    for ours, theirs in names.items():
        for kind in ("weight", "bias"):
            getattr(getattr(target, ours), kind).copy_(weights[f"{at}.{theirs}.{kind}"])


def lerobot_act() -> tuple[DetrDecoder, dict[str, Tensor], Tensor, Tensor]:
    """The network with LeRobot's weights, all tensors, and the memory with its positions as ACT makes them."""
    golden = load_file(GOLDEN)
    w = {k.removeprefix("model."): v for k, v in golden.items() if k.startswith("model.")}
    config = Detr(width=32, encoder=2, decoder=1, heads=4, hidden=64)
    net = DetrDecoder(config, replace(tools.PORTS, width=32, A=5, out=5, latent=8))
    with torch.no_grad():
        net.memory.weight.copy_(torch.eye(32))
        net.memory.bias.zero_()
        net.latent.weight.copy_(w["encoder_latent_input_proj.weight"])
        net.latent.bias.copy_(w["encoder_latent_input_proj.bias"])
        net.latent_position.copy_(w["encoder_1d_feature_pos_embed.weight"][:1])
        net.query.copy_(w["decoder_pos_embed.weight"])
        for stack, name in ((net.encoder, "encoder"), (net.decoder, "decoder")):
            for i, layer in enumerate(stack):
                fill(layer, w, f"{name}.layers.{i}")
        for kind in ("weight", "bias"):
            getattr(net.norm, kind).copy_(w[f"decoder.norm.{kind}"])
            getattr(net.leave, kind).copy_(w[f"action_head.{kind}"])
    project = w["encoder_img_feat_input_proj.weight"], w["encoder_img_feat_input_proj.bias"]
    state = F.linear(
        golden["input.state"],
        w["encoder_robot_state_input_proj.weight"],
        w["encoder_robot_state_input_proj.bias"],
    )
    maps = [F.conv2d(golden[f"intermediate.feature_map_{k}"], *project).flatten(2).mT for k in range(2)]
    places = [golden[f"intermediate.camera_positions_{k}"].flatten(2).mT for k in range(2)]
    memory = torch.cat([state[:, None], *maps], dim=1)
    return net, golden, memory, torch.cat([w["encoder_1d_feature_pos_embed.weight"][None, 1:], *places], dim=1)


def assert_golden(got: Tensor, name: str, golden: Mapping[str, Tensor]) -> None:
    with safe_open(GOLDEN, "pt") as file:
        tolerance = json.loads(file.metadata()["tolerances"])[name]
    torch.testing.assert_close(got, golden[name], atol=tolerance["atol"], rtol=tolerance["rtol"])


def drawn_latent(golden: Mapping[str, Tensor]) -> Tensor:
    """The latent of the reference's training pass, which its intermediate tensors belong to."""
    return golden["expected.mu"] + (golden["expected.log_variance"] / 2).exp() * golden["input.latent_noise"]


def test_golden_act_of_lerobot() -> None:
    """Memory and positions as in the reference: encoder, decoder, and the chunks of a drawn latent and of zero."""
    net, golden, memory, positions = lerobot_act()
    x, seen = torch.zeros(2, 8, 5), []
    with torch.no_grad():
        hook = net.encoder[-1].register_forward_hook(lambda m, given, out: seen.append(out))
        decoded = net.decode(memory, None, x, None, drawn_latent(golden), positions)
        hook.remove()
        assert_golden(seen[0], "intermediate.encoder_out", golden)
        assert_golden(decoded, "intermediate.decoder_out", golden)
        assert_golden(net.leave(decoded), "expected.actions_train", golden)
        at_zero = net.leave(net.decode(memory, None, x, None, torch.zeros(2, 8), positions))
    assert_golden(at_zero, "expected.chunk_z0", golden)


def test_positions_matter_and_padding_does_not() -> None:
    net, golden, memory, positions = lerobot_act()
    x, latent = torch.zeros(2, 8, 5), drawn_latent(golden)
    with torch.no_grad():
        plain = net.decode(memory, None, x, None, latent)
        assert (plain - golden["intermediate.decoder_out"]).abs().max() > 0.05
        longer, valid = F.pad(memory, (0, 0, 0, 2), value=9.0), torch.ones(2, 15, dtype=torch.bool)
        valid[:, 13:] = False
        decoded = net.decode(longer, valid, x, None, latent, F.pad(positions, (0, 0, 0, 2), value=3.0))
    assert_golden(decoded, "intermediate.decoder_out", golden)


@pytest.mark.parametrize(
    ("config", "setting"),
    [(c, s) for c in (CrossAttention, Detr) for s in ({"width": 0}, {"heads": 0}, {"hidden": 0}, {"heads": 3})]
    + [(CrossAttention, {"layers": 0}), (Detr, {"decoder": 0}), (Detr, {"encoder": -1})],
)
def test_refused_settings(config: type, setting: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{config.__name__}: expected .*{next(iter(setting))}"):
        config(**setting)


@networks
def test_arguments_that_were_not_announced_are_refused(make, config) -> None:
    network, context = tools.build(make, config, PORTS["latent"]), tools.backbone(config)(tools.inputs())
    x, _, latent = tools.arguments(PORTS["latent"])
    with pytest.raises(InputError, match="expected a latent, got none"):
        network(context, x, None)
    with pytest.raises(InputError, match="expected no tau, got one"):
        network(context, x, torch.zeros(3), latent)
    with pytest.raises(InputError, match=r"latent: expected shape \(B Z\) with B=3, Z=4, got \(3, 5\)"):
        network(context, x, None, torch.zeros(3, 5))
