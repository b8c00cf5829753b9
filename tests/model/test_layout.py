"""Layouts: every form of a mask agrees with an independently written one, and the proofs agree with computation."""

import copy
import itertools
import json
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from vola.errors import ConfigError, InputError
from vola.model import layouts
from vola.model.layout import Blind, Block, Causal, Full, Layout, Rule, Self, TimeCausal

# --- published masks, written a second time by other means -------------------------------------------------------


def table(n: int, sees: Callable[[int, int], bool]) -> torch.Tensor:
    return torch.tensor([[sees(q, k) for k in range(n)] for q in range(n)])


def cumulative(flags: list[int]) -> torch.Tensor:
    """openpi's rule: key j is visible to query i iff cumsum(flags)[j] <= cumsum(flags)[i]."""
    sums = list(itertools.accumulate(flags))
    return table(len(flags), lambda q, k: sums[k] <= sums[q])


def octo_table(task: int, obs: int, read: int, steps: int) -> torch.Tensor:
    tokens = [("task", 0)] * task
    tokens += [("obs", t) for t in range(steps) for _ in range(obs)]
    tokens += [("read", t) for t in range(steps) for _ in range(read)]

    def sees(q: int, k: int) -> bool:
        (reader, now), (target, then) = tokens[q], tokens[k]
        if target == "task":
            return True
        if reader == "task" or then > now:
            return False
        return target == "obs" or reader == "read"

    return table(len(tokens), sees)


def rt1_table(frames: int, image: int, action: int) -> torch.Tensor:
    is_action = ([False] * image + [True] * action) * frames
    return table(len(is_action), lambda q, k: k <= q and not (is_action[q] and is_action[k]))


def insulated_table(prefix: int, fast: int, action: int) -> torch.Tensor:
    n = prefix + fast + action
    mask = torch.zeros(n, n, dtype=torch.bool)
    mask[:, :prefix] = True
    mask[prefix : prefix + fast, prefix : prefix + fast] = torch.ones(fast, fast).tril().bool()
    mask[prefix + fast :, prefix + fast :] = True
    return mask


def triples_to_blocks(n: int) -> torch.Tensor:
    """Decision Transformer: the lower triangle over (R, s, a, R, s, a, ...), reordered to R...s...a..."""
    order = [3 * t + i for i in range(3) for t in range(n)]
    return torch.ones(3 * n, 3 * n).tril().bool()[order][:, order]


PUBLISHED = {
    "pi0": (layouts.pi0(4, 3, 1, 5), cumulative([0] * 7 + [1] + [1, 0, 0, 0, 0])),
    "pi0 without cameras": (layouts.pi0(0, 3, 1, 5), cumulative([0] * 3 + [1] + [1, 0, 0, 0, 0])),
    "pi0.5": (layouts.pi05({"image": 4, "text": 3}, 5), cumulative([0] * 7 + [1, 0, 0, 0, 0])),
    "pi0-FAST": (layouts.prefix_lm(5, 4), cumulative([0] * 5 + [1] * 4)),
    "knowledge insulation": (layouts.insulated({"image": 3, "text": 2}, 4, 3), insulated_table(5, 4, 3)),
    "OpenVLA": (layouts.causal(6), table(6, lambda q, k: k <= q)),
    "OFT": (layouts.oft(4, 1, 3, 5), table(13, lambda q, k: True)),
    "Octo": (layouts.octo(3, 2, 2, 3), octo_table(3, 2, 2, 3)),
    "Octo, one step": (layouts.octo(3, 2, 1, 1), octo_table(3, 2, 1, 1)),
    "RT-1": (layouts.rt1(6, 8, 11), rt1_table(6, 8, 11)),
    "ACT": (layouts.act(6, 5), table(13, lambda q, k: q >= 8 or k < 8)),
    "Decision Transformer": (layouts.decision_transformer(4), triples_to_blocks(4)),
}
published = pytest.mark.parametrize("name", PUBLISHED)


@published
def test_published_masks_bit_for_bit(name: str) -> None:
    layout, expected = PUBLISHED[name]
    assert torch.equal(layout.dense(), expected)


def test_rt1_at_its_published_size() -> None:
    assert layouts.rt1(6, 8, 11).length == 114


# --- random layouts ----------------------------------------------------------------------------------------------


@st.composite
def any_layout(draw: st.DrawFn) -> Layout:
    steps = draw(st.integers(1, 3))
    blocks = []
    for i in range(draw(st.integers(1, 4))):
        inner = draw(st.sampled_from([Full(), Causal(), Self(), Blind(), TimeCausal(steps)]))
        length = draw(st.integers(1, 2)) * steps if isinstance(inner, TimeCausal) else draw(st.integers(1, 3))
        blocks.append(Block(f"b{i}", length, inner))
    rules = []
    for a, b in itertools.permutations(blocks, 2):
        timed = isinstance(a.inner, TimeCausal) and isinstance(b.inner, TimeCausal)
        when = draw(st.sampled_from([None, "always", "not_after", "before"] if timed else [None, "always"]))
        rules += [Rule(a.name, b.name, when)] if when else []
    return Layout(tuple(blocks), tuple(draw(st.permutations(rules))))


def by_loops(layout: Layout) -> torch.Tensor:
    """The definition of blocks and rules, read off one pair of tokens at a time."""
    tokens = [(b, i) for b in layout.blocks for i in range(b.length)]
    when = {(r.reader, r.target): r.when for r in layout.rules}

    def step(b: Block, i: int) -> int:
        assert isinstance(b.inner, TimeCausal)
        return i // (b.length // b.inner.steps)

    def sees(q: int, k: int) -> bool:
        (a, i), (b, j) = tokens[q], tokens[k]
        if a is b:
            match a.inner:
                case Full():
                    return True
                case Causal():
                    return j <= i
                case Self():
                    return j == i
                case Blind():
                    return False
                case TimeCausal():
                    return step(b, j) <= step(a, i)
        match when.get((a.name, b.name)):
            case None:
                return False
            case "always":
                return True
            case "not_after":
                return step(b, j) <= step(a, i)
            case _:
                return step(b, j) < step(a, i)

    return table(len(tokens), sees)


def chosen(layout: Layout, names: tuple[str, ...]) -> list[int]:
    return [i for name in names for i in range(layout.length)[layout.slice(name)]]


@given(any_layout(), st.data())
@settings(max_examples=60, deadline=None)
def test_all_forms_agree(layout: Layout, data: st.DataObject) -> None:
    mask = by_loops(layout)
    n = layout.length
    assert torch.equal(layout.dense(), mask)
    assert torch.equal(table(n, layout.allows), mask)
    q = torch.arange(n)
    assert torch.equal(layout.allows(q[:, None], q), mask)
    assert torch.equal(layout.allows(n - 1, q), mask[-1])
    assert layout.all_allowed() == bool(mask.all())

    some = st.lists(st.sampled_from(layout.names), unique=True, min_size=1).map(
        lambda x: tuple(sorted(x, key=layout.index))
    )
    rows, columns = data.draw(some), data.draw(some)
    part = mask[chosen(layout, rows)][:, chosen(layout, columns)]
    assert torch.equal(layout.dense(rows, columns), part)
    assert layout.all_allowed(rows, columns) == bool(part.all())

    picture = layout.picture(tokens=True).splitlines()[1:]
    signs = [line.split(maxsplit=2)[2].replace(" ", "") for line in picture]
    assert signs == ["".join("#" if x else "." for x in row) for row in mask.tolist()]


@given(any_layout())
@settings(max_examples=15, deadline=None)
def test_flex_forms_agree(layout: Layout) -> None:
    n = layout.length
    assert torch.equal(create_mask(layout.mask_mod(), None, None, n, n, device="cpu")[0, 0], layout.dense())
    blocks = layout.flex(block_size=1)  # with blocks of one token the block mask is the mask
    assert torch.equal(blocks.to_dense()[0, 0].bool(), layout.dense())


@published
def test_flex_forms_agree_on_published(name: str) -> None:
    layout, expected = PUBLISHED[name]
    rows, columns = layout.names[-1:], layout.names[:-1] or layout.names
    part = expected[chosen(layout, rows)][:, chosen(layout, columns)]
    mask = create_mask(layout.mask_mod(rows, columns), None, None, *part.shape, device="cpu")
    assert torch.equal(mask[0, 0], part)
    assert torch.equal(layout.flex(rows, columns, block_size=1).to_dense()[0, 0].bool(), part)


# --- proofs ------------------------------------------------------------------------------------------------------


def closure(mask: torch.Tensor) -> torch.Tensor:
    """Tokens with a path of any length, the residual stream included: (I + M)^N > 0."""
    step = mask.double() + torch.eye(len(mask), dtype=torch.double)
    return torch.linalg.matrix_power(step / len(mask), len(mask)) > 0


@given(any_layout())
@settings(max_examples=60, deadline=None)
def test_reaches_is_the_matrix_power(layout: Layout) -> None:
    far = closure(by_loops(layout))
    for a, b in itertools.product(layout.names, repeat=2):
        assert layout.reaches(a, b) == bool(far[layout.slice(a), layout.slice(b)].any()), (a, b)


def stack(x: torch.Tensor, mask: torch.Tensor, depth: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Plain attention layers with a residual stream, in doubles; also the input of every layer."""
    d = x.shape[-1]
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for _ in range(depth):
        inputs.append(x)
        wq, wk, wv = (torch.randn(d, d, generator=generator, dtype=x.dtype) / d**0.5 for _ in range(3))
        scores = (x @ wq) @ (x @ wk).T / d**0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
        x = x + weights @ torch.tanh(x @ wv)
    return x, inputs


@given(any_layout())
@settings(max_examples=25, deadline=None)
def test_reaches_is_what_a_network_does(layout: Layout) -> None:
    depth = layout.length  # no shortest path is longer
    x = torch.randn(layout.length, 6, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    before, _ = stack(x, layout.dense(), depth)
    for b in layout.names:
        changed = x.clone()
        changed[layout.slice(b)] += 1.0
        after, _ = stack(changed, layout.dense(), depth)
        for a in layout.names:
            moved = not torch.equal(before[layout.slice(a)], after[layout.slice(a)])
            assert moved == layout.reaches(a, b), (a, b)


@given(any_layout(), st.data())
@settings(max_examples=60, deadline=None)
def test_cacheable_is_cached_equals_full(layout: Layout, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(layout.names), unique=True, min_size=1))
    rows = chosen(layout, tuple(sorted(names, key=layout.index)))
    mask = by_loops(layout)
    outside = [i for i in range(layout.length) if i not in rows]
    closed = not mask[rows][:, outside].any()
    assert layout.cacheable(*names) == closed
    assert bool(layout.leaks(*names)) != closed

    x = torch.randn(layout.length, 6, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    full, _ = stack(x, mask, 3)
    alone, _ = stack(x[rows], mask[rows][:, rows], 3)
    assert torch.allclose(full[rows], alone, atol=1e-12) == closed


def test_meaning_of_published() -> None:
    pi0 = layouts.pi0(4, 3, 1, 5)
    assert pi0.cacheable("image", "text")
    assert pi0.cacheable("image", "text", "state")
    assert not pi0.cacheable("image")
    assert pi0.leaks("state") == (("state", "image"), ("state", "text"))
    assert not any(pi0.reaches(a, "action") for a in ("image", "text", "state"))

    ki = layouts.insulated(4, 3, 3)
    assert not ki.reaches("action", "fast")
    assert not ki.reaches("fast", "action")
    assert ki.cacheable("prefix", "action")

    octo = layouts.octo(2, 2, 1, 3)
    assert not any(octo.reaches(a, "readout") for a in ("task", "observation"))
    assert octo.cacheable("task", "observation")
    assert not octo.cacheable("observation")

    rt1 = layouts.rt1(3, 2, 2)
    assert not rt1.dense(("action2",), ("action0", "action1", "action2")).any()
    assert rt1.reaches("action2", "action0")  # blind to actions, yet later images carry them
    assert not rt1.reaches("image0", "action0")


# --- text --------------------------------------------------------------------------------------------------------


def test_picture_of_pi0() -> None:
    layout = layouts.pi0(4, 3, 1, 5)
    assert str(layout) == layout.picture()
    assert str(layout).splitlines() == [
        "(rows = who looks)  image  text  state  action",
        "image  x4             #     #      .      .",
        "text   x3             #     #      .      .",
        "state  x1             #     #      #      .",
        "action x5             #     #      #      #",
        "# all   . nothing",
    ]


@pytest.mark.parametrize(
    ("inner", "sign"), [(Full(), "#"), (Causal(), "\\"), (Self(), "I"), (Blind(), "."), (TimeCausal(2), "~")]
)
def test_signs(inner: object, sign: str) -> None:
    lines = Layout((Block("a", 4, inner),)).picture().splitlines()
    assert lines[1].split() == ["a", "x4", sign]
    assert lines[2].startswith(f"{sign} ")
    assert "   " not in lines[2]  # the legend explains the signs used and no other


def test_picture_of_time_rules() -> None:
    lines = layouts.decision_transformer(3).picture().splitlines()
    assert [line.split()[2:] for line in lines[1:4]] == [["\\", "<", "<"], ["~", "\\", "<"], ["~", "~", "\\"]]


def test_explain() -> None:
    assert layouts.pi0(4, 3, 1, 5).explain().splitlines()[2:] == [
        "state reads image, text, itself; action reads state.",
        "action reads image, text, state, itself; nothing reads action.",
    ]
    octo = layouts.octo(2, 2, 2, 3).explain()
    assert "readout reads task, observation (up to its own time step), itself (up to its own time step)" in octo
    assert "; observation, readout read task." in octo
    rt1 = layouts.rt1(2, 2, 2).explain().splitlines()
    assert rt1[1] == "action0 reads image0; image1 reads action0."
    assert (
        rt1[3] == "action1 reads image0, image1; nothing reads action1; action0 reaches it only through other blocks."
    )


# --- a value -----------------------------------------------------------------------------------------------------


@given(any_layout())
@settings(max_examples=30, deadline=None)
def test_json_and_equality(layout: Layout) -> None:
    back = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    turned = Layout(layout.blocks, tuple(reversed(layout.rules)))
    for same in (back, turned, copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert same == layout
        assert hash(same) == hash(layout)
        assert same.picture(tokens=True) == layout.picture(tokens=True)


def test_different_layouts_differ() -> None:
    assert layouts.pi0(4, 3, 1, 5) != layouts.pi0(4, 3, 1, 6)
    assert len({layouts.pi0(4, 3, 1, 5), layouts.pi0(4, 3, 1, 5), layouts.oft(4, 3, 1, 5)}) == 2


def test_masks_made_in_inference_mode_serve_training() -> None:
    with torch.inference_mode():
        mask = layouts.causal(17).dense()
    x = torch.randn(17, 17, requires_grad=True)
    x.masked_fill(~mask, 0.0).sum().backward()
    assert torch.equal(x.grad, mask.float())


def test_places() -> None:
    layout = layouts.pi0(4, 3, 1, 5)
    assert layout.names == ("image", "text", "state", "action")
    assert (layout.length, layout.index("state"), layout.slice("state")) == (13, 2, slice(7, 8))
    assert layout.block("text") == Block("text", 3)


# --- refusals ----------------------------------------------------------------------------------------------------

A, B = Block("image", 2), Block("text", 2)
T2, T3 = Block("image", 6, TimeCausal(2)), Block("text", 6, TimeCausal(3))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Block("", 2), "non-empty name"),
        (lambda: Block("image", 0), "'image': expected a length >= 1, got 0"),
        (lambda: Block("image", True), "got True"),
        (lambda: Block("image", 2, Full), "expected inner to be Full"),
        (lambda: Block("image", 5, TimeCausal(2)), "divisible by its number of steps, got length 5"),
        (lambda: Block("image", 5, TimeCausal(0)), r"TimeCausal\(0\)"),
        (lambda: Rule("image", "text", "after"), "one of .*'not_after'.* got 'after'"),
        (lambda: Layout(()), "at least one block"),
        (lambda: Layout((A, A)), "'image' twice"),
        (lambda: Layout((A, B), (Rule("image", "txt"),)), r"\['image', 'text'\], got 'txt'. Did you mean 'text'\?"),
        (lambda: Layout((A, B), (Rule("image", "image"),)), "two different blocks"),
        (lambda: Layout((A, B), (Rule("image", "text"), Rule("image", "text"))), "'image' -> 'text' twice"),
        (lambda: Layout((A, B), (Rule("image", "text", "before"),)), r"needs two TimeCausal .* got Full\(\)"),
        (lambda: Layout((T2, T3), (Rule("image", "text", "not_after"),)), "as many steps"),
        (lambda: Layout((A, B)).dense(("text", "image")), r"in the order \['image', 'text'\]"),
        (lambda: Layout((A, B)).dense(("text", "text")), "distinct"),
        (lambda: Layout((A, B)).dense("text"), "tuple of block names"),
        (lambda: Layout((A, B)).reaches("text", "imge"), "Did you mean 'image'"),
        (lambda: Layout((A, B)).cacheable("nothing like it"), "got 'nothing like it'.$"),
        (lambda: Layout.from_json({"blocks": [{"name": "a", "length": 1}], "rules": []}), "'inner'"),
        (lambda: Layout.from_json({"blocks": [{"name": "a", "length": 1, "inner": "ful"}], "rules": []}), "'ful'"),
        (lambda: Layout.from_json({"blocks": []}), "at least one|'rules'"),
        (lambda: layouts.pi05({}, 3), "a prefix of at least one block"),
    ],
)
def test_refusals(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_token_out_of_range() -> None:
    with pytest.raises(InputError, match=r"0\.\.3, got 4"):
        Layout((A, B)).allows(4, 0)
