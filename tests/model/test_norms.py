"""Norms: the formulas, Gemma's 1 + weight, and adaptive norms that start closed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vola.errors import ConfigError
from vola.model import layouts
from vola.model.layers import FeedForward, count_parameters
from vola.model.norms import AdaptiveRMSNorm, LayerNorm, RMSNorm, make_norm
from vola.model.positions import NoPositions
from vola.model.trunk import Expert, ExpertConfig, Segment, TrunkConfig, run

D = 8


def tokens(seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(2, 3, D, generator=torch.Generator().manual_seed(seed)) + 0.5


def shaken(norm: torch.nn.Module) -> torch.nn.Module:
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(torch.randn(p.shape, generator=rng))
    return norm


@given(st.integers(0, 99), st.sampled_from([1e-3, 1.0, 1e3]))
@settings(max_examples=30, deadline=None)
def test_formulas(seed: int, scale: float) -> None:
    x = tokens(seed, scale)
    y = x.double().numpy()
    rms, layer = shaken(RMSNorm(D)), shaken(LayerNorm(D))
    unit = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)
    out, gate = rms(x)
    assert gate is None
    np.testing.assert_allclose(out.detach(), unit * (1 + rms.weight.detach().numpy()), atol=1e-4)
    centred = y - y.mean(-1, keepdims=True)
    unit = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    out, gate = layer(x)
    assert gate is None
    np.testing.assert_allclose(
        out.detach(), unit * layer.weight.detach().numpy() + layer.bias.detach().numpy(), atol=1e-3
    )


@pytest.mark.parametrize(("kind", "bound"), [("layer", 1e-4), ("rms", 1e-4), ("adaptive_rms", 1e-4)])
def test_scale_of_the_input_does_not_matter_and_the_start_is_neutral(kind: str, bound: float) -> None:
    norm, condition = make_norm(kind, D, 4), torch.randn(2, 4)
    x = tokens()
    out = norm(x, condition)[0]
    torch.testing.assert_close(norm(1000 * x, condition)[0], out, atol=bound, rtol=bound)
    centred = out - out.mean(-1, keepdim=True) if kind == "layer" else out
    torch.testing.assert_close((centred**2).mean(-1), torch.ones(2, 3), atol=1e-4, rtol=0)


def test_adaptive_norm_is_scale_shift_gate_in_this_order() -> None:
    """pi0.5: one dense map of the condition, split in scale, shift, gate; y = rms(x) * (1 + scale) + shift."""
    norm = shaken(AdaptiveRMSNorm(D, 4))
    x, condition = tokens(), torch.randn(2, 4)
    out, gate = norm(x, condition)
    dense = condition @ norm.modulation.weight.T + norm.modulation.bias
    scale, shift, expected_gate = dense[:, None, :D], dense[:, None, D : 2 * D], dense[:, None, 2 * D :]
    unit = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(out, unit * (1 + scale) + shift)
    torch.testing.assert_close(gate, expected_gate)


def test_adaptive_norms_start_closed() -> None:
    """Gate 0: an untrained expert passes its tokens on, whatever the condition; its gates still get gradients."""
    assert not any(p.any() for p in AdaptiveRMSNorm(D, 4).parameters())
    made = Expert(TrunkConfig(3, 2, 2, 4, NoPositions()), ExpertConfig(D, D, "adaptive_rms", condition=4))
    x, layout = tokens(), layouts.bidirectional(token=3)
    outs = [run([Segment(made, ("token",), x, condition=torch.randn(2, 4))], layout)[0][0] for _ in range(2)]
    unit = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(outs[0], unit)
    torch.testing.assert_close(outs[1], unit)
    (outs[0] * torch.randn(2, 3, D)).sum().backward()
    gates = made.layers[0].attention_norm.modulation.weight.grad[2 * D :]
    assert (gates != 0).any()


def test_condition_is_per_sample() -> None:
    norm = shaken(AdaptiveRMSNorm(D, 4))
    x, condition = tokens(), torch.randn(2, 4)
    other = condition.clone()
    other[1] += 1
    one, two = norm(x, condition)[0], norm(x, other)[0]
    assert torch.equal(one[0], two[0])
    assert not torch.allclose(one[1], two[1])


def test_norms_stay_in_bfloat16() -> None:
    for kind in ("layer", "rms", "adaptive_rms"):
        norm = make_norm(kind, D, 4).bfloat16()
        x = tokens(scale=30).bfloat16()
        out = norm(x, torch.randn(2, 4).bfloat16())[0]
        assert out.dtype is torch.bfloat16
        exact = make_norm(kind, D, 4)(x.float(), torch.zeros(2, 4))[0]
        torch.testing.assert_close(out.float(), exact, atol=0.02, rtol=0.01)


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="expected 'layer', 'rms' or 'adaptive_rms', got 'batch'"):
        make_norm("batch", D)
    with pytest.raises(ConfigError, match="width of the conditioning vector"):
        make_norm("adaptive_rms", D)
    with pytest.raises(ConfigError, match="use norm='rms' without flow time"):
        make_norm("adaptive_rms", D, 4)(tokens())
    with pytest.raises(ConfigError, match="'gelu', 'geglu' or 'swiglu', got 'relu'"):
        FeedForward(D, D, "relu", bias=True)


@pytest.mark.parametrize(("activation", "products"), [("gelu", 2), ("geglu", 3), ("swiglu", 3)])
def test_feed_forward_sizes(activation: str, products: int) -> None:
    assert count_parameters(FeedForward(D, 12, activation, bias=False)) == products * D * 12


def test_shared_weights_count_once() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    assert count_parameters(torch.nn.Sequential(layer, layer)) == 16
