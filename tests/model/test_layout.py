"""A layout is the mask its authors describe; every form of it agrees, and its proofs agree with computation."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from expected_masks import CHAINS, PUBLISHED, SMALL, matrix, random_layouts
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from vola.errors import ConfigError, InputError
from vola.model import layouts
from vola.model.attention import attention
from vola.model.layout import Blind, Block, Causal, Full, Layout, Rule, Self, TimeCausal

ALL = {name: layout for name, (layout, _) in PUBLISHED.items()} | CHAINS
FEW = settings(max_examples=40, deadline=None)


def places(layout: Layout, names: tuple[str, ...]) -> list[int]:
    return [i for name in names for i in range(layout.length)[layout.slice(name)]]


def some_blocks(layout: Layout) -> st.SearchStrategy[tuple[str, ...]]:
    names = st.lists(st.sampled_from(layout.names), unique=True, min_size=1)
    return names.map(lambda x: tuple(sorted(x, key=layout.index)))


# --- every form of the mask ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layout_is_bit_for_bit_the_described_mask(name: str) -> None:
    layout, expected = PUBLISHED[name]
    assert layout.length == len(expected)
    np.testing.assert_array_equal(layout.dense().numpy(), expected)


def test_published_sizes() -> None:
    assert PUBLISHED["rt1"][0].length == 114
    assert PUBLISHED["pi0 at full size"][0].length == 867


@pytest.mark.parametrize("name", [*SMALL, *CHAINS])
def test_all_forms_of_the_mask_agree(name: str) -> None:
    layout = ALL[name]
    N = layout.length
    expected = matrix(layout)
    np.testing.assert_array_equal(layout.dense().numpy(), expected)
    flex = create_mask(layout.mask_mod(), None, None, N, N, device="cpu")
    np.testing.assert_array_equal(flex[0, 0].numpy(), expected)
    single = layout.flex(block_size=1)  # with tiles of one token the block mask is the mask
    np.testing.assert_array_equal(single.to_dense()[0, 0].numpy().astype(bool), expected)


@pytest.mark.parametrize("name", ["rt1", "octo", "insulated"])
@pytest.mark.parametrize("size", [4, 16])
def test_block_mask_keeps_exactly_the_tiles_that_hold_something(name: str, size: int) -> None:
    layout, expected = PUBLISHED[name]
    padded = np.zeros((-(-len(expected) // size) * size,) * 2, dtype=bool)
    padded[: len(expected), : len(expected)] = expected
    n = len(padded) // size
    some = padded.reshape(n, size, n, size).any((1, 3))
    np.testing.assert_array_equal(layout.flex(block_size=size).to_dense()[0, 0].numpy().astype(bool), some)


@given(random_layouts(), st.data())
@FEW
def test_random_layout_means_its_words(layout: Layout, data: st.DataObject) -> None:
    expected, N = matrix(layout), layout.length
    np.testing.assert_array_equal(layout.dense().numpy(), expected)
    np.testing.assert_array_equal([[layout.allows(q, k) for k in range(N)] for q in range(N)], expected)
    token = torch.arange(N)
    np.testing.assert_array_equal(layout.allows(token[:, None], token), expected)
    np.testing.assert_array_equal(layout.allows(N - 1, token), expected[-1])

    rows, columns = data.draw(some_blocks(layout)), data.draw(some_blocks(layout))
    part = expected[np.ix_(places(layout, rows), places(layout, columns))]
    np.testing.assert_array_equal(layout.dense(rows, columns).numpy(), part)
    assert layout.all_allowed(rows, columns) == part.all()
    flex = create_mask(layout.mask_mod(rows, columns), None, None, *part.shape, device="cpu")
    np.testing.assert_array_equal(flex[0, 0].numpy(), part)


# --- proofs ----------------------------------------------------------------------------------------------------------


def closure(mask: np.ndarray) -> np.ndarray:
    """Who can influence whom after any number of layers: the N-th power of (mask or identity)."""
    step = mask | np.eye(len(mask), dtype=bool)
    power = step
    for _ in range(len(mask)):
        power = (power.astype(int) @ step.astype(int)) > 0
    return power


@given(random_layouts(), st.data())
@FEW
def test_reaches_leaks_and_cacheable_follow_from_the_matrix(layout: Layout, data: st.DataObject) -> None:
    mask = matrix(layout)
    reach = closure(mask)
    for a in layout.names:
        for b in layout.names:
            pair = np.ix_(places(layout, (a,)), places(layout, (b,)))
            assert layout.reaches(a, b) == reach[pair].any()
            assert ((a, b) in layout.leaks(a)) == (a != b and mask[pair].any())
    some = data.draw(some_blocks(layout))
    inside = places(layout, some)
    outside = [i for i in range(layout.length) if i not in inside]
    assert layout.cacheable(*some) == (not mask[np.ix_(inside, outside)].any())
    assert layout.cacheable(*some) == (layout.leaks(*some) == ())
    assert layout.cacheable(*layout.names)


def jacobian(layout: Layout, depth: int) -> Tensor:
    """|d output / d input| summed over width, ``N N``, of a residual attention stack with random weights."""
    rng = torch.Generator().manual_seed(0)
    N, D = layout.length, 4
    weights = torch.randn(depth, 3, D, D, generator=rng, dtype=torch.float64)

    def network(x: Tensor) -> Tensor:
        for wq, wk, wv in weights:
            q, k, v = ((x @ w)[None, None] for w in (wq, wk, wv))
            x = x + torch.tanh(attention(q, k, v, layout=layout)[0, 0])
        return x

    x = torch.randn(N, D, generator=rng, dtype=torch.float64)
    return torch.autograd.functional.jacobian(network, x).abs().sum((1, 3))


@pytest.mark.parametrize("name", [*SMALL, *CHAINS])
def test_reaches_is_what_gradients_flow_through(name: str) -> None:
    layout = ALL[name]
    flows = jacobian(layout, depth=4) > 0
    np.testing.assert_array_equal(flows.numpy(), closure(matrix(layout)))
    for a in layout.names:
        for b in layout.names:
            assert layout.reaches(a, b) == bool(flows[layout.slice(a), layout.slice(b)].any())


@given(random_layouts(max_blocks=3))
@settings(max_examples=15, deadline=None)
def test_reaches_is_what_gradients_flow_through_in_random_layouts(layout: Layout) -> None:
    np.testing.assert_array_equal((jacobian(layout, depth=layout.length) > 0).numpy(), closure(matrix(layout)))


def stack(x: Tensor, mask: Tensor, depth: int) -> Tensor:
    """Plain attention layers with a residual stream, in doubles, on a mask and not on a layout."""
    rng = torch.Generator().manual_seed(0)
    for _ in range(depth):
        wq, wk, wv = torch.randn(3, *[x.shape[-1]] * 2, generator=rng, dtype=x.dtype)
        scores = ((x @ wq) @ (x @ wk).T / 4).masked_fill(~mask, -torch.inf)
        x = x + scores.softmax(-1).nan_to_num(0.0) @ torch.tanh(x @ wv)
    return x


@given(random_layouts(), st.data())
@FEW
def test_cacheable_is_computed_alone_equals_computed_together(layout: Layout, data: st.DataObject) -> None:
    mask = torch.from_numpy(matrix(layout))
    some = data.draw(some_blocks(layout))
    inside = places(layout, some)
    x = torch.randn(layout.length, 6, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    full = stack(x, mask, 3)[inside]
    alone = stack(x[inside], mask[inside][:, inside], 3)
    assert torch.allclose(full, alone, atol=1e-12) == layout.cacheable(*some)


def test_claims_about_the_published_systems() -> None:
    pi0, octo, ki, rt1 = (PUBLISHED[name][0] for name in ("pi0", "octo", "insulated", "rt1 small"))
    assert pi0.cacheable("image", "text")
    assert pi0.cacheable("image", "text", "state")
    assert not pi0.cacheable("image")
    assert pi0.leaks("image", "state") == (("image", "text"), ("state", "text"))
    assert not any(pi0.reaches(b, "action") for b in ("image", "text", "state"))
    assert not any(octo.reaches(b, "readout") for b in ("task", "observation"))
    assert octo.cacheable("task", "observation")
    assert not octo.cacheable("observation")
    assert not ki.reaches("action", "fast")
    assert not ki.reaches("fast", "action")
    assert ki.cacheable("image", "text", "action")
    assert rt1.reaches("action1", "action0")  # through image1, although no slot looks at a slot
    assert not rt1.dense(("action1",), ("action0", "action1")).any()
    assert not rt1.reaches("image0", "action0")
    assert not PUBLISHED["oft"][0].cacheable("image", "state", "text")


# --- a value ---------------------------------------------------------------------------------------------------------


def test_equal_layouts_are_one_key() -> None:
    blocks = (Block("a", 2), Block("b", 1, Causal()))
    one = Layout(blocks, (Rule("b", "a"), Rule("a", "b")))
    two = Layout(blocks, (Rule("a", "b"), Rule("b", "a")))
    assert one == two
    assert len({one, two, Layout(list(blocks), list(one.rules))}) == 1
    assert one.dense() is two.dense()  # the cached matrix is found under either
    for other in (
        Layout(blocks, (Rule("b", "a"),)),
        Layout((Block("a", 2), Block("b", 1)), one.rules),
        Layout((Block("a", 3), blocks[1]), one.rules),
        Layout(blocks[::-1], one.rules),
    ):
        assert other != one


@given(random_layouts())
@FEW
def test_round_trips(layout: Layout) -> None:
    for back in (
        Layout.from_json(json.loads(json.dumps(layout.to_json()))),
        pickle.loads(pickle.dumps(layout)),
        copy.deepcopy(layout),
    ):
        assert back == layout
        assert hash(back) == hash(layout)
        assert torch.equal(back.dense(), layout.dense())


def test_stored_hash_does_not_travel() -> None:
    """Hashes of strings differ between processes, so that a pickled one would hide the layout from every cache."""
    assert b"_hash" not in pickle.dumps(ALL["pi0"])


def test_masks_first_asked_for_under_inference_mode_serve_training() -> None:
    with torch.inference_mode():
        mask = layouts.causal(17).dense()
    x = torch.randn(17, 17, requires_grad=True)
    x.masked_fill(~mask, 0.0).sum().backward()
    assert torch.equal(x.grad, mask.float())


def test_places_in_the_sequence() -> None:
    layout = layouts.pi0(4, 3, 1, 5)
    assert layout.names == ("image", "text", "state", "action")
    assert (layout.length, layout.index("state"), layout.slice("state")) == (13, 2, slice(7, 8))
    assert layout.block("text") == Block("text", 3)


# --- refusals --------------------------------------------------------------------------------------------------------

A, B = Block("image", 2), Block("action", 4, TimeCausal(2))
BOTH = Layout((A, B))
C = Block("later", 3, TimeCausal(3))


def from_json(**block: object) -> Layout:
    return Layout.from_json({"blocks": [{"name": "a", "length": 1} | block], "rules": []})


MISTAKES = {
    "no blocks": (lambda: Layout(()), "at least one block"),
    "duplicate": (lambda: Layout((A, A)), "distinct block names, got 'image' twice"),
    "empty name": (lambda: Block(" ", 1), "non-empty name"),
    "length": (lambda: Block("a", 0), "length >= 1, got 0. Leave out empty blocks"),
    "bool length": (lambda: Block("a", True), "length >= 1, got True"),
    "inner class": (lambda: Block("a", 1, Full), "Full()"),
    "steps": (lambda: Block("a", 5, TimeCausal(2)), "divisible by its number of steps, got length 5"),
    "no steps": (lambda: Block("a", 5, TimeCausal(0)), "TimeCausal(0)"),
    "typo": (lambda: Layout((A, B), (Rule("acton", "image"),)), "got 'acton'. Did you mean 'action'?"),
    "typo in a question": (lambda: BOTH.reaches("action", "imge"), "got 'imge'. Did you mean 'image'?"),
    "unknown": (lambda: BOTH.slice("zzz"), "expected one of the blocks ['image', 'action'], got 'zzz'."),
    "unknown cached": (lambda: BOTH.cacheable("zzz"), "got 'zzz'."),
    "itself": (lambda: Layout((A,), (Rule("image", "image"),)), "its inner"),
    "two rules": (lambda: Layout((A, B), (Rule("image", "action"),) * 2), "'image' -> 'action' twice"),
    "when": (lambda: Rule("a", "b", "after"), "['always', 'not_after', 'before'], got 'after'"),
    "time": (lambda: Layout((A, B), (Rule("action", "image", "before"),)), "TimeCausal(steps=2) and Full()"),
    "times": (lambda: Layout((B, C), (Rule("later", "action", "not_after"),)), "as many steps"),
    "order": (lambda: BOTH.dense(("action", "image")), "distinct blocks in the order ['image', 'action']"),
    "repeated": (lambda: BOTH.dense(("image", "image")), "distinct blocks"),
    "one string": (lambda: BOTH.dense("image"), "write ('image',)"),
    "prefix": (lambda: layouts.pi05({}, 3), "prefix of at least one block"),
    "json without inner": (from_json, "'inner'"),
    "json word": (lambda: from_json(inner="ful"), "'ful'"),
    "json steps": (lambda: from_json(inner="full", steps=1), "steps"),
    "json key": (lambda: Layout.from_json({"blocks": []}), "'rules'"),
    "json extra": (lambda: Layout.from_json({"blocks": [], "rules": [], "mask": 1}), "'mask'"),
    "json list": (lambda: Layout.from_json({"blocks": ["a"], "rules": []}), "'name', 'length', 'inner'"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistake_is_answered_with_a_sentence(case: str) -> None:
    make, needle = MISTAKES[case]
    with pytest.raises(ConfigError, match="expected|needs") as caught:
        make()
    assert needle in str(caught.value)


@pytest.mark.parametrize(("q", "k", "got"), [(0, 6, 6), (6, 0, 6), (-1, 0, -1)])
def test_token_outside_the_layout(q: int, k: int, got: int) -> None:
    with pytest.raises(InputError, match=rf"0\.\.5, got {got}"):
        BOTH.allows(q, k)


def test_blocks_of_every_inner_have_their_times() -> None:
    assert [Block("a", 4, i).times for i in (Full(), Causal(), Self(), Blind(), TimeCausal(2))] == [1, 4, 4, 1, 2]
