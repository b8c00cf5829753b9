"""Experts with the weights of other implementations give their numbers: Gemma, Llama, PaliGemma, pi0, pi0.5.

``tests/golden/gemma`` and ``tests/golden/llama`` are outputs of randomly initialised reference models (their
``spec.json`` says which); the larger ones lie in the folder of reference data, and are skipped where it is absent.
The last tests write one layer a second time, in numpy, for the kinds of layer that no reference model covers.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from vola.model import layouts
from vola.model.backbone import Context, Inputs
from vola.model.language import WordEmbedding, WordEncoder
from vola.model.layout import Block, Causal, Layout, Rule
from vola.model.networks import ExpertInTrunk, ExpertNetwork, Ports
from vola.model.norms import AdaptiveRMSNorm, RMSNorm
from vola.model.positions import Rotary
from vola.model.trunk import Expert, ExpertConfig, Segment, TrunkConfig, run

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
Weights = Mapping[str, Tensor]


def load(folder: Path) -> tuple[Weights, Weights, dict]:
    spec = json.loads((folder / "spec.json").read_text())
    return load_file(folder / "weights.safetensors"), load_file(folder / "io.safetensors"), spec


def assert_golden(got: Tensor, name: str, io: Weights, spec: dict, valid: Tensor | None = None) -> None:
    expected, tolerance = io[name], spec["tensors"][name]
    if valid is not None:
        got = got * valid.view(*valid.shape, *[1] * (got.ndim - valid.ndim))
    torch.testing.assert_close(got, expected, atol=tolerance["atol"], rtol=tolerance["rtol"])


def fill(made: Expert, weights: Weights, prefix: str, one_plus: bool = True, eps: float = 1e-6) -> Expert:
    """Copy a Gemma or Llama stack; ``one_plus`` says that its norms multiply by 1 + weight, as ours do."""

    def norm(target: torch.nn.Module, key: str) -> None:
        target.eps = eps
        if isinstance(target, AdaptiveRMSNorm):
            target.modulation.weight.copy_(weights[f"{key}.dense.weight"])
            target.modulation.bias.copy_(weights[f"{key}.dense.bias"])
        else:
            assert isinstance(target, RMSNorm)
            target.weight.copy_(weights[f"{key}.weight"] - (0 if one_plus else 1))

    with torch.no_grad():
        for i, layer in enumerate(made.layers):
            at = f"{prefix}layers.{i}."
            attention = [weights[f"{at}self_attn.{x}_proj.weight"] for x in "qkv"]
            layer.qkv.weight.copy_(torch.cat(attention))
            layer.out.weight.copy_(weights[f"{at}self_attn.o_proj.weight"])
            layer.ffn.up.weight.copy_(torch.cat([weights[f"{at}mlp.{x}_proj.weight"] for x in ("gate", "up")]))
            layer.ffn.down.weight.copy_(weights[f"{at}mlp.down_proj.weight"])
            norm(layer.attention_norm, f"{at}input_layernorm")
            norm(layer.ffn_norm, f"{at}post_attention_layernorm")
        norm(made.norm, f"{prefix}norm")
    return made


def language_model(name: str) -> tuple[Expert, Weights, Weights, dict]:
    weights, io, spec = load(GOLDEN / name)
    c = spec["config"]
    trunk = TrunkConfig(
        c["num_hidden_layers"],
        c["num_attention_heads"],
        c["num_key_value_heads"],
        c["head_dim"],
        Rotary(c.get("rope_theta", 10_000.0)),
    )
    kind = ExpertConfig(c["hidden_size"], c["intermediate_size"], activation="geglu" if name == "gemma" else "swiglu")
    made = fill(Expert(trunk, kind), weights, "model.", one_plus=name == "gemma", eps=c["rms_norm_eps"])
    return made, weights, io, spec


def embed(weights: Weights, ids: Tensor, name: str) -> Tensor:
    table = weights["model.embed_tokens.weight"]
    return table[ids] * (math.sqrt(table.shape[1]) if name == "gemma" else 1.0)


def logits(weights: Weights, hidden: Tensor) -> Tensor:
    return hidden @ weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).T


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gemma", "llama"])
def test_language_model(name: str, side: str) -> None:
    made, weights, io, spec = language_model(name)
    valid = io[f"input.{side}_attention_mask"].bool()
    tokens = embed(weights, io[f"input.{side}_input_ids"], name)
    with torch.no_grad():
        (hidden,), _ = run([Segment(made, ("token",), tokens, valid)], layouts.causal(10))
    assert_golden(tokens, f"intermediate.{side}_hidden_0", io, spec, valid)
    assert_golden(hidden, f"intermediate.{side}_hidden_2", io, spec, valid)
    assert_golden(logits(weights, hidden), f"expected.{side}_logits", io, spec, valid)


@pytest.mark.parametrize("name", ["gemma", "llama"])
def test_greedy_continuation_from_a_growing_cache(name: str) -> None:
    """A prompt with left padding, then one token per pass, each read from the cache."""
    made, weights, io, spec = language_model(name)
    new = spec["config"]["new"]
    names = [f"token{i}" for i in range(new)]
    layout = Layout(
        (Block("prompt", 10, Causal()), *(Block(n, 1) for n in names)),
        tuple(Rule(n, earlier) for i, n in enumerate(names) for earlier in ["prompt", *names[:i]]),
    )
    ids, found, cache = io["input.left_input_ids"], [], None
    valid = io["input.left_attention_mask"].bool()
    for block in ["prompt", *names]:
        with torch.no_grad():
            (out,), cache = run([Segment(made, (block,), embed(weights, ids, name), valid)], layout, cache)
        scores = logits(weights, out[:, -1])
        scores[:, spec["config"]["eos_token_id"]] = -torch.inf
        ids, valid = scores.argmax(-1, keepdim=True), None
        found.append(ids)
    assert torch.equal(torch.cat(found[:new], dim=1), io["expected.greedy_ids"])


def test_paligemma_prefix_lm(shared: Path) -> None:
    """The language half of PaliGemma over given image features: bidirectional prefix, causal suffix."""
    weights, io, spec = load(shared / "golden" / "paligemma")
    c = spec["config"]["text"]
    trunk = TrunkConfig(2, c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], Rotary())
    config = ExpertConfig(c["hidden_size"], c["intermediate_size"], activation="geglu")
    made = fill(Expert(trunk, config), weights, "model.language_model.")
    valid = io["input.right_attention_mask"].bool()
    layout = layouts.prefix_lm(9, 4)
    tokens = io["intermediate.right_hidden_0"]
    table = weights["model.language_model.embed_tokens.weight"]
    with torch.no_grad():
        (hidden,), _ = run([Segment(made, layout.names, tokens, valid)], layout)
        (prefix,), _ = run([Segment(made, ("prefix",), tokens[:, :9], valid[:, :9])], layout)
    assert_golden(hidden @ table.T, "expected.right_logits", io, spec, valid)
    assert_golden(prefix @ table.T, "expected.prefill_logits", io, spec)


def pi(shared: Path, name: str) -> tuple[Expert, ExpertInTrunk, Weights, Weights, dict]:
    """Prefix expert and action network with the weights of pi0 or pi0.5."""
    weights, io, spec = load(shared / "golden" / name)
    weights = {k.removeprefix("model."): v for k, v in weights.items()}
    c = spec["config"]
    trunk = TrunkConfig(c["depth"], c["heads"], c["kv"], c["hd"], Rotary())
    prefix = Expert(trunk, ExpertConfig(c["W"], c["mlp"], activation="geglu"))
    kind = ExpertConfig(c["EW"], c["emlp"], activation="geglu")
    if name == "pi05":
        kind = replace(kind, norm="adaptive_rms", condition=c["EW"])
    A = c["max_action"]
    plugs = Ports(trunk, c["W"], c["chunk"], A, A, time=True, noise=True)
    network = ExpertInTrunk(ExpertNetwork(kind, "adaptive" if name == "pi05" else "concat"), plugs)
    fill(prefix, weights, "paligemma_with_expert.paligemma.model.language_model.")
    fill(network.expert, weights, "paligemma_with_expert.gemma_expert.model.")
    mix = "time_mlp" if name == "pi05" else "action_time_mlp"
    named = {"enter": "action_in_proj", "leave": "action_out_proj", "mix_in": f"{mix}_in", "mix_out": f"{mix}_out"}
    with torch.no_grad():
        network.step.zero_()
        for ours, theirs in named.items():
            network.get_submodule(ours).weight.copy_(weights[f"{theirs}.weight"])
            network.get_submodule(ours).bias.copy_(weights[f"{theirs}.bias"])
    return prefix, network, weights, io, spec


@pytest.mark.parametrize("name", ["pi0", "pi05"])
def test_pi0_prefix_velocity_and_chunk(name: str, shared: Path) -> None:
    """Keys and values of the prefix, one velocity, and ten Euler steps from the cache."""
    prefix, network, weights, io, spec = pi(shared, name)
    text = spec["config"]["L"]
    embeds, valid = io["intermediate.prefix_embeds"], io["intermediate.prefix_valid"]
    if name == "pi0":
        layout, blocks = layouts.pi0(embeds.shape[1] - text, text, 1, 8), ("image", "text")
    else:
        layout, blocks = layouts.pi05({"image": embeds.shape[1] - text, "text": text}, 8), ("image", "text")
    segment = Segment(prefix, blocks, embeds, valid)
    with torch.no_grad():
        (hidden,), cache = run([segment], layout)
        assert_golden(hidden, "intermediate.prefix_hidden_final", io, spec, valid)
        for i in range(2):
            for kind, got in (("key", cache.keys[i]), ("value", cache.values[i])):
                assert_golden(got[:, 0], f"intermediate.prefix_{kind}_layer{i}", _flat(io), spec, valid)
        if name == "pi0":  # the state is a token of the action expert
            state = torch.nn.functional.pad(io["input.state"], (0, 25))
            token = state @ weights["state_proj.weight"].T + weights["state_proj.bias"]
            _, cache = run([Segment(network.expert, ("state",), token[:, None])], layout, cache)
        words = torch.zeros(len(embeds), text, dtype=torch.long)
        inputs = Inputs({}, {}, torch.zeros(len(embeds), 1, 1), None, words, None)
        context = Context(inputs, WordEncoder(WordEmbedding(2), 2, 2), segment, layout, cache, None)
        assert_golden(network(context, io["input.x_t"], io["input.t"]), "expected.velocity", io, spec)
        x = io["input.noise"]
        for step in range(10):  # their time runs from 1 (noise) to 0 (data)
            x = x - network(context, x, torch.full((2,), 1 - step / 10)) / 10
        assert_golden(x, "expected.chunk_all_dims", io, spec)


def _flat(io: Weights) -> Weights:
    """Keys and values without the axis of their single head."""
    return {k: v[:, 0] if v.ndim == 4 and v.shape[1] == 1 else v for k, v in io.items()}


# --- a layer written a second time -----------------------------------------------------------------------------------


def numpy_norm(kind: str, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    if kind == "layer":
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * weight + bias
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + weight)


def numpy_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def numpy_rope(x: np.ndarray, position: int, base: float) -> np.ndarray:
    """Every pair (i, i + d/2) as a complex number, turned by position * base^(-2i/d)."""
    half = len(x) // 2
    turn = np.exp(1j * position * base ** (-2 * np.arange(half) / len(x)))
    z = (x[:half] + 1j * x[half:]) * turn
    return np.concatenate([z.real, z.imag])


def numpy_expert(made: Expert, x: np.ndarray, allowed: np.ndarray, position: list[int]) -> np.ndarray:
    """One sample through a whole expert, token by token and head by head, in doubles."""
    w = {k: v.detach().double().numpy() for k, v in made.state_dict().items()}
    trunk, config = made.trunk, made.config
    H, K, d, N = trunk.heads, trunk.kv_heads, trunk.head_dim, len(x)

    def linear(y: np.ndarray, at: str) -> np.ndarray:
        return y @ w[f"{at}.weight"].T + w.get(f"{at}.bias", 0.0)

    def norm(y: np.ndarray, at: str) -> np.ndarray:
        return numpy_norm(config.norm, y, w[f"{at}.weight"], w.get(f"{at}.bias"))

    for i in range(trunk.depth):
        at = f"layers.{i}."
        y = linear(norm(x, f"{at}attention_norm"), f"{at}qkv")
        q = y[:, : H * d].reshape(N, H, d)
        k, v = (y[:, start : start + K * d].reshape(N, K, d) for start in (H * d, (H + K) * d))
        if isinstance(trunk.positions, Rotary):
            base = trunk.positions.base
            q = np.array([[numpy_rope(q[n, h], position[n], base) for h in range(H)] for n in range(N)])
            k = np.array([[numpy_rope(k[n, h], position[n], base) for h in range(K)] for n in range(N)])
        attended = np.zeros((N, H, d))
        for n in range(N):
            seen = np.flatnonzero(allowed[n])
            for h in range(H):
                kv = h * K // H
                scores = k[seen, kv] @ q[n, h] / math.sqrt(d)
                weights = np.exp(scores - scores.max())
                attended[n, h] = weights / weights.sum() @ v[seen, kv]
        x = x + linear(attended.reshape(N, H * d), f"{at}out")
        y = linear(norm(x, f"{at}ffn_norm"), f"{at}ffn.up")
        half = y.shape[1] // 2
        match config.activation:
            case "gelu":
                y = numpy_gelu(y)
            case "geglu":
                y = numpy_gelu(y[:, :half]) * y[:, half:]
            case "swiglu":
                y = y[:, :half] / (1 + np.exp(-y[:, :half])) * y[:, half:]
        x = x + linear(y, f"{at}ffn.down")
    return norm(x, "norm")


@pytest.mark.parametrize(
    ("norm", "activation", "bias", "base"),
    [("rms", "geglu", False, 1e4), ("rms", "swiglu", False, 5e5), ("layer", "gelu", True, 1e4)],
    ids=["Gemma", "Llama", "pre-LN GELU"],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_expert_written_a_second_time(norm: str, activation: str, bias: bool, base: float, kv_heads: int) -> None:
    torch.manual_seed(0)
    made = Expert(TrunkConfig(2, 4, kv_heads, 6, Rotary(base)), ExpertConfig(10, 14, norm, activation, bias))
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.2 * torch.randn(p.shape))
    layout = layouts.pi0(2, 2, 1, 3)
    x = torch.randn(1, 8, 10)
    valid = torch.tensor([[True, False, True, True, True, True, False, True]])
    with torch.no_grad():
        (out,), _ = run([Segment(made, layout.names, x, valid)], layout)
    expected = numpy_expert(made, x[0].double().numpy(), (layout.dense() & valid).numpy(), [0, 0, 1, 2, 3, 4, 4, 5])
    np.testing.assert_allclose(out[0].numpy(), expected, atol=1e-5, rtol=1e-5)
