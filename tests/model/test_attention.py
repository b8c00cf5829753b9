"""Attention: three backends against the formula in loops, what must change nothing, the cache against the full pass."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vola.errors import ConfigError, InputError
from vola.model import layouts
from vola.model.attention import Backend, Cache, attend, attention, prepare
from vola.model.layout import Blind, Block, Causal, Layout, Rule, TimeCausal

LAYOUTS = {
    "pi0": layouts.pi0(4, 3, 1, 5),
    "knowledge insulation": layouts.insulated(3, 3, 2),
    "Octo": layouts.octo(2, 2, 1, 3),
    "RT-1": layouts.rt1(2, 3, 2),
    "Decision Transformer": layouts.decision_transformer(3),
    "OFT": layouts.oft(3, 1, 2, 2),
    # Four rows without any permitted key: the whole of "blind", and step 0 of "late".
    "lonely": Layout(
        (Block("blind", 2, Blind()), Block("seen", 4, TimeCausal(2)), Block("late", 4, TimeCausal(2))),
        (Rule("late", "seen", "before"),),
    ),
    "empty rows": Layout(
        (Block("blind", 2, Blind()), Block("reader", 2, Blind()), Block("token", 3, Causal())),
        (Rule("reader", "token"),),
    ),
}
layout_names = pytest.mark.parametrize("name", LAYOUTS)
without_flex = pytest.mark.parametrize("backend", ["reference", "sdpa"])


def inputs(
    layout: Layout, B: int = 2, Hq: int = 4, Hk: int = 2, d: int = 4, seed: int = 0, grad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, heads, layout.length, d, generator=g) for heads in (Hq, Hk, Hk))
    return q.requires_grad_(grad), k.requires_grad_(grad), v.requires_grad_(grad)


def padding(layout: Layout, B: int = 2, seed: int = 0) -> Tensor:
    """Random valid keys; sample 0 has none at all."""
    valid = torch.rand(B, layout.length, generator=torch.Generator().manual_seed(seed)) > 0.3
    valid[0] = False
    return valid


def by_loops(q: Tensor, k: Tensor, v: Tensor, layout: Layout, valid: Tensor | None, scale: float) -> Tensor:
    """softmax(scale * q k) v over the permitted keys, one query at a time, in doubles; zero where there is no key."""
    out = torch.zeros(q.shape, dtype=torch.double)
    share = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys = [j for j in range(k.shape[2]) if layout.allows(i, j) and (valid is None or valid[b, j])]
                scores = [scale * float(q[b, h, i].double() @ k[b, h // share, j].double()) for j in keys]
                weights = [math.exp(s - max(scores)) for s in scores]
                for w, j in zip(weights, keys, strict=True):
                    out[b, h, i] += w / sum(weights) * v[b, h // share, j].double()
    return out


# --- the formula -------------------------------------------------------------------------------------------------


@layout_names
@without_flex
@pytest.mark.parametrize(("padded", "scale"), [(False, None), (True, 1.3)])
def test_is_the_formula(name: str, backend: Backend, padded: bool, scale: float | None) -> None:
    layout = LAYOUTS[name]
    q, k, v = inputs(layout)
    valid = padding(layout) if padded else None
    out = attention(q, k, v, layout=layout, valid=valid, backend=backend, scale=scale)
    expected = by_loops(q, k, v, layout, valid, scale or 0.5)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["pi0", "empty rows", "Octo"])
@pytest.mark.parametrize("padded", [False, True])
def test_flex_is_the_formula(name: str, padded: bool) -> None:
    layout = LAYOUTS[name]
    q, k, v = inputs(layout)
    valid = padding(layout) if padded else None
    out = attention(q, k, v, layout=layout, valid=valid, backend="flex")
    expected = attention(q, k, v, layout=layout, valid=valid, backend="reference")
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(out == 0, expected == 0)


@given(
    st.sampled_from(sorted(LAYOUTS)), st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]), st.integers(0, 999), st.data()
)
@settings(max_examples=40, deadline=None)
def test_backends_agree_with_gradients(name: str, heads: tuple[int, int], seed: int, data: st.DataObject) -> None:
    layout = LAYOUTS[name]
    valid = data.draw(st.sampled_from([None, padding(layout, seed=seed)]))
    weight = torch.randn(2, heads[0], layout.length, 4, generator=torch.Generator().manual_seed(seed))
    results = []
    for backend in ("reference", "sdpa"):
        q, k, v = inputs(layout, Hq=heads[0], Hk=heads[1], seed=seed, grad=True)
        out = attention(q, k, v, layout=layout, valid=valid, backend=backend)
        (out * weight).sum().backward()
        results.append((out.detach(), q.grad, k.grad, v.grad))
    for a, b in zip(*results, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@layout_names
@without_flex
def test_gradients_flow_exactly_where_permitted(name: str, backend: Backend) -> None:
    layout = LAYOUTS[name]
    valid = padding(layout)
    q, k, v = inputs(layout, grad=True)
    out = attention(q, k, v, layout=layout, valid=valid, backend=backend)
    for i in range(layout.length):
        grads = torch.autograd.grad(out[:, :, i].sum(), (k, v), retain_graph=True)
        permitted = layout.dense()[i] & valid
        assert torch.equal(grads[1].abs().sum((1, 3)) > 0, permitted)
        assert not grads[0].abs().sum((1, 3))[~permitted].any()


@without_flex
def test_parts_are_slices_of_the_whole(backend: Backend) -> None:
    layout = LAYOUTS["pi0"]
    q, k, v = inputs(layout)
    valid = padding(layout)
    whole = attention(q, k, v, layout=layout, valid=valid, backend=backend)
    rows = ("text", "action")
    take = torch.cat([torch.arange(layout.length)[layout.slice(name)] for name in rows])
    part = attention(q[:, :, take], k, v, layout=layout, rows=rows, valid=valid, backend=backend)
    torch.testing.assert_close(part, whole[:, :, take])
    n = layout.slice("state").stop  # the state reads nothing later, so these columns are all it needs
    seen = {"layout": layout, "rows": ("state",), "columns": ("image", "text", "state"), "backend": backend}
    part = attention(q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], valid=valid[:, :n], **seen)
    torch.testing.assert_close(part, whole[:, :, n - 1 : n])


def test_softmax_of_the_reference_is_in_float32() -> None:
    layout = layouts.bidirectional(token=300)
    q, k, v = (x.bfloat16() for x in inputs(layout, B=1, d=8))
    out = attention(q, k, v, layout=layout, backend="reference")
    assert out.dtype is torch.bfloat16
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    exact = (q.double() @ k.double().transpose(-1, -2) * 8**-0.5).softmax(-1) @ v.double()
    narrow = (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1) @ v
    rounding = 2**-8 * exact.abs() + 1e-5
    assert ((out - exact).abs() <= rounding).all()
    assert not ((narrow - exact).abs() <= rounding).all()


def test_gradients_are_those_of_the_formula() -> None:
    """Finite differences in doubles, with padding, grouped heads and rows without any key."""
    layout = LAYOUTS["lonely"]
    leaves = [x.double().requires_grad_() for x in (y.detach() for y in inputs(layout, Hq=2, Hk=1, d=2))]
    valid = padding(layout)
    assert torch.autograd.gradcheck(lambda *qkv: attention(*qkv, layout=layout, valid=valid), leaves)


# --- what must change nothing ------------------------------------------------------------------------------------


@layout_names
@without_flex
def test_empty_rows_are_zero_and_harmless(name: str, backend: Backend) -> None:
    layout = LAYOUTS[name]
    for valid in (None, padding(layout)):
        q, k, v = inputs(layout, grad=True)
        out = attention(q, k, v, layout=layout, valid=valid, backend=backend)
        permitted = layout.dense().expand(2, -1, -1) if valid is None else layout.dense() & valid[:, None]
        empty = ~permitted.any(-1)
        assert empty.any() == (valid is not None or name in ("lonely", "empty rows"))
        assert torch.equal((out == 0).all(-1), empty[:, None].expand(out.shape[:3]))
        out.square().sum().backward()
        assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
        assert not q.grad.abs().sum((1, 3))[empty].any()


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, backend) for name in LAYOUTS for backend in ("reference", "sdpa")] + [("pi0", "flex"), ("lonely", "flex")],
)
def test_poison_in_invalid_keys(name: str, backend: Backend) -> None:
    layout = LAYOUTS[name]
    q, k, v = inputs(layout)
    valid = padding(layout)
    clean = attention(q, k, v, layout=layout, valid=valid, backend=backend)
    padded = ~valid[:, None, :, None]
    for poison in (1e30, -1e30):
        bad = k.masked_fill(padded, poison), v.masked_fill(padded, poison)
        assert torch.equal(attention(q, *bad, layout=layout, valid=valid, backend=backend), clean)


@layout_names
def test_reference_ignores_nan_in_invalid_keys(name: str) -> None:
    layout = LAYOUTS[name]
    valid = padding(layout)
    padded = ~valid[:, None, :, None]
    results = []
    for poison in (0.0, math.nan):
        q, k, v = inputs(layout)
        k, v = k.masked_fill(padded, poison), v.masked_fill(padded, poison)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention(q, k, v, layout=layout, valid=valid, backend="reference")
        out.square().sum().backward()
        results.append((out.detach(), *(x.grad for x in leaves)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# --- speed that must not be lost ---------------------------------------------------------------------------------


def test_no_mask_where_everything_is_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, m, **o: masks.append(m) or fused(q, k, v, m, **o)
    )
    layout = LAYOUTS["pi0"]
    q, k, v = inputs(layout)
    attention(q[:, :, 8:], k, v, layout=layout, rows=("action",))
    attention(q, k, v, layout=layout)
    assert masks[0] is None
    assert masks[1] is not None


def test_a_prepared_mask_is_shared_and_the_same() -> None:
    layout = LAYOUTS["pi0"]
    q, k, v = inputs(layout)
    valid = padding(layout)
    mask = prepare(layout, None, None, valid, q.device, q.dtype)
    assert torch.equal(attend(q, k, v, mask), attention(q, k, v, layout=layout, valid=valid))
    static = prepare(layout, None, None, None, q.device, q.dtype)
    assert static is prepare(layout, None, None, None, q.device, q.dtype)


@without_flex
def test_masks_made_in_inference_mode_serve_training(backend: Backend) -> None:
    layout = layouts.causal(9 if backend == "sdpa" else 10)
    q, k, v = inputs(layout, grad=True)
    with torch.inference_mode():
        dense = layout.dense()
        attention(q, k, v, layout=layout, backend=backend)
    attention(q, k, v, layout=layout, backend=backend).sum().backward()
    assert torch.isfinite(q.grad).all()
    torch.where(dense, q[0, 0, :, :1], 0.0).sum().backward()  # autograd saves the mask itself here


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda a: a | {"q": a["q"][:, :, 1:]}, InputError, r"q: expected shape \(B Hq N d\) with N=13"),
        (lambda a: a | {"q": a["q"][0]}, InputError, r"q: expected shape \(B Hq N d\), got \(4, 13, 4\)"),
        (lambda a: a | {"k": a["k"][0]}, InputError, r"k: expected shape \(B Hk M d\), got \(2, 13, 4\)"),
        (lambda a: a | {"k": a["k"][:, :, 1:]}, InputError, r"k: expected shape .*M=13.*got \(2, 2, 12, 4\)"),
        (lambda a: a | {"v": a["v"][..., 1:]}, InputError, "v: expected shape"),
        (lambda a: a | {"v": a["v"][:, :1]}, InputError, "v: expected shape .*Hk=2"),
        (lambda a: a | {"k": a["k"][:1], "v": a["v"][:1]}, InputError, "k: expected shape .*B=2"),
        (lambda a: a | {"q": a["q"][:, :3]}, InputError, "the key heads divide, got 3 and 2"),
        (lambda a: a | {"valid": torch.ones(2, 12, dtype=torch.bool)}, InputError, "valid: expected shape .*M=13"),
        (lambda a: a | {"valid": torch.ones(1, 13, dtype=torch.bool)}, InputError, "valid: expected shape .*B=2"),
        (lambda a: a | {"valid": torch.ones(2, 13)}, InputError, "expected a bool tensor"),
        (lambda a: a | {"backend": "flash"}, ConfigError, r"\['reference', 'sdpa', 'flex'\], got 'flash'"),
        (lambda a: a | {"rows": ("action", "text")}, ConfigError, "in the order"),
        (lambda a: a | {"columns": ("txt",)}, ConfigError, "Did you mean 'text'"),
        (lambda a: a | {"q": a["q"].requires_grad_(), "backend": "flex"}, ConfigError, "no gradients on CPU"),
    ],
)
def test_refusals(change: Callable[[dict], dict], error: type[Exception], says: str) -> None:
    layout = LAYOUTS["pi0"]
    q, k, v = inputs(layout)
    arguments = change({"q": q, "k": k, "v": v, "layout": layout})
    with pytest.raises(error, match=says):
        attention(**arguments)


# --- the cache ---------------------------------------------------------------------------------------------------


def filled(layout: Layout, columns: tuple[str, ...], valid: Tensor | None = None, seed: int = 0) -> Cache:
    n = sum(layout.block(name).length for name in columns)
    g = torch.Generator().manual_seed(seed)
    pairs = [tuple(torch.randn(2, 1, n, 4, generator=g) for _ in range(3)) for _ in range(2)]
    return Cache(pairs[0], pairs[1], layout, columns, valid, torch.tensor([[n]]))


def test_cached_suffix_equals_the_full_pass() -> None:
    layout = LAYOUTS["pi0"]
    q, k, v = inputs(layout)
    valid = padding(layout)
    full = attention(q, k, v, layout=layout, valid=valid)
    prefix, rest = ("image", "text"), ("state", "action")
    cache = Cache((k[:, :, :7],), (v[:, :, :7],), layout, prefix, valid[:, :7], torch.tensor([[7]]))
    longer = cache.extend((k[:, :, 7:],), (v[:, :, 7:],), rest, valid[:, 7:], torch.tensor([[13]]))
    assert longer.columns == layout.names
    now = attention(
        q[:, :, 7:],
        longer.keys[0],
        longer.values[0],
        layout=layout,
        rows=rest,
        columns=longer.columns,
        valid=longer.valid,
    )
    torch.testing.assert_close(now, full[:, :, 7:])
    first = attention(
        q[:, :, :7], cache.keys[0], cache.values[0], layout=layout, rows=prefix, columns=prefix, valid=cache.valid
    )
    torch.testing.assert_close(first, full[:, :, :7])


def test_cache_refuses_what_would_be_wrong() -> None:
    layout = LAYOUTS["pi0"]
    with pytest.raises(
        ConfigError, match=r"outside \['text', 'state'\], but 'text' reads 'image', 'state' reads 'image'"
    ):
        filled(layout, ("text", "state"))
    with pytest.raises(ConfigError, match="in the order"):
        filled(layout, ("text", "image"))
    with pytest.raises(ConfigError, match="in the order"):
        filled(layout, ("image", "text")).extend((), (), ("image",), None, torch.tensor([[0]]))
    with pytest.raises(InputError, match="3 layers, got 0 and 0"):
        filled(layout, ("image", "text")).extend((), (), ("state",), None, torch.tensor([[0]]))
    filled(LAYOUTS["knowledge insulation"], ("prefix", "action"))  # not contiguous, and right
    cache = filled(layout, ("image", "text"))
    with pytest.raises(InputError, match="cached keys: expected shape .*M=8"):
        replace(cache, columns=("image", "text", "state"))
    with pytest.raises(InputError, match="cached values"):
        replace(cache, values=tuple(x[:, :, 1:] for x in cache.values))
    with pytest.raises(InputError, match="got 3 and 2"):
        replace(cache, values=cache.values[:2])
    with pytest.raises(InputError, match="cached valid: .*M=7"):
        replace(cache, valid=torch.ones(2, 8, dtype=torch.bool))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("new", [False, True])
def test_extend(old: bool, new: bool) -> None:
    layout = LAYOUTS["pi0"]
    v_old = torch.rand(2, 7) > 0.5 if old else None
    v_new = torch.rand(2, 1) > 0.5 if new else None
    cache = filled(layout, ("image", "text"), v_old)
    more = filled(Layout((layout.block("state"),)), ("state",), seed=1)
    longer = cache.extend(more.keys, more.values, ("state",), v_new, torch.tensor([[8]]))
    assert longer.columns == ("image", "text", "state")
    assert cache.keys[0].shape[2] == 7  # the old one is as it was
    for layer in range(3):
        assert torch.equal(longer.keys[layer], torch.cat([cache.keys[layer], more.keys[layer]], dim=2))
        assert torch.equal(longer.values[layer], torch.cat([cache.values[layer], more.values[layer]], dim=2))
    if not old and not new:
        assert longer.valid is None
    else:
        parts = [torch.ones(2, 7, dtype=torch.bool) if v_old is None else v_old]
        parts += [torch.ones(2, 1, dtype=torch.bool) if v_new is None else v_new]
        assert torch.equal(longer.valid, torch.cat(parts, dim=1))
