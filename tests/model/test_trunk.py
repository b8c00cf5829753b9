"""Several experts, one attention: cached equals full, invalid tokens are as if absent, nothing sees what it may not."""

import itertools
from dataclasses import replace

import pytest
import torch
from expected_masks import PUBLISHED, SMALL, random_layouts
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vola.errors import ConfigError, InputError
from vola.model import layouts
from vola.model.layout import Block, Layout, Rule, TimeCausal
from vola.model.positions import Learned, NoPositions, Positions, Rotary, Sinusoidal
from vola.model.trunk import Expert, ExpertConfig, Segment, TrunkConfig, run

B = 3
PI0 = layouts.pi0(4, 3, 1, 5)
POSITIONS: dict[str, Positions] = {
    "rotary": Rotary(),
    "sinusoidal": Sinusoidal(base=100.0),
    "learned": Learned(24),
    "none": NoPositions(),
}
each_position = pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)


def trunk_config(positions: Positions = Rotary(), kv_heads: int = 2, depth: int = 2, **more: object) -> TrunkConfig:  # noqa: B008
    return TrunkConfig(depth, heads=4, kv_heads=kv_heads, head_dim=4, positions=positions, **more)


def expert(trunk: TrunkConfig, width: int, seed: int = 0, outputs: bool = True, **config: object) -> Expert:
    """An expert whose every weight matters: none is at its initial value."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        made = Expert(trunk, ExpertConfig(width, 2 * width, **config), outputs)
        for p in made.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    return made


def segment(made: Expert, layout: Layout, blocks: tuple[str, ...], holes: bool = True, seed: int = 0) -> Segment:
    """Random tokens; with holes, some of samples 1 and 2 are invalid, in the middle and at the ends."""
    rng = torch.Generator().manual_seed(seed + layout.slice(blocks[0]).start)
    n = sum(layout.block(name).length for name in blocks)
    valid = torch.rand(B, n, generator=rng) < 0.6
    valid[0] = True
    condition = torch.randn(B, made.config.condition, generator=rng) if made.config.condition else None
    return Segment(
        made, blocks, torch.randn(B, n, made.config.width, generator=rng), valid if holes else None, condition
    )


def prefixes(layout: Layout) -> list[int]:
    """Every number of leading blocks that can be cached."""
    return [i for i in range(1, len(layout.names)) if layout.cacheable(*layout.names[:i])]


def assert_cached_equals_full(first: Segment, second: Segment, layout: Layout) -> None:
    (prefix_out, full), whole = run([first, second], layout)
    (alone,), cache = run([first], layout)
    (cached,), joined = run([second], layout, cache)
    assert full.abs().max() > 0.1
    torch.testing.assert_close(alone, prefix_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cached, full, atol=1e-5, rtol=1e-5)
    for one, two in zip(whole.keys + whole.values, joined.keys + joined.values, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    assert torch.equal(whole.position.expand(B, 1), joined.position.expand(B, 1))


@pytest.mark.parametrize("holes", [True, False], ids=["holes", "whole"])
@pytest.mark.parametrize("name", [name for name in SMALL if prefixes(PUBLISHED[name][0])])
def test_cached_suffix_equals_full_run_for_every_cacheable_prefix(name: str, holes: bool) -> None:
    layout = PUBLISHED[name][0]
    trunk = trunk_config()
    wide, narrow = expert(trunk, 12), expert(trunk, 8, seed=1)
    for i in prefixes(layout):
        first = segment(wide, layout, layout.names[:i], holes)
        second = segment(narrow, layout, layout.names[i:], holes)
        with torch.no_grad():
            assert_cached_equals_full(first, second, layout)


@each_position
@pytest.mark.parametrize("norm", ["layer", "rms", "adaptive_rms"])
@pytest.mark.parametrize("activation", ["gelu", "geglu", "swiglu"])
def test_cached_equals_full_for_every_kind_of_layer(positions: Positions, norm: str, activation: str) -> None:
    trunk = trunk_config(positions, kv_heads=1)
    condition = 6 if norm == "adaptive_rms" else 0
    wide = expert(trunk, 12, norm="layer" if norm == "layer" else "rms", activation=activation, bias=True)
    narrow = expert(trunk, 8, seed=1, norm=norm, activation=activation, condition=condition)
    with torch.no_grad():
        assert_cached_equals_full(segment(wide, PI0, ("image", "text")), segment(narrow, PI0, ("state", "action")), PI0)


@given(random_layouts(), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_cached_equals_full_in_random_layouts(layout: Layout, seed: int) -> None:
    """Closed prefixes give equal results, and any other prefix is refused."""
    trunk = trunk_config(kv_heads=4)
    wide, narrow = expert(trunk, 12), expert(trunk, 8, seed=1)
    for i in range(1, len(layout.names)):
        first = segment(wide, layout, layout.names[:i], seed=seed)
        with torch.no_grad():
            if layout.cacheable(*layout.names[:i]):
                second = segment(narrow, layout, layout.names[i:], seed=seed)
                (_, full), _ = run([first, second], layout)
                (cached,), _ = run([second], layout, run([first], layout)[1])
                torch.testing.assert_close(cached, full, atol=1e-5, rtol=1e-5)
            else:
                row, column = layout.leaks(*layout.names[:i])[0]
                with pytest.raises(ConfigError, match=f"'{row}' reads '{column}'"):
                    run([first], layout)


@each_position
def test_cached_blocks_equal_the_full_pass_exactly_when_they_are_closed(positions: Positions) -> None:
    """Leading blocks alone (what they read of the rest left out) have the keys of the full pass iff cacheable."""
    trunk = trunk_config(positions)
    made = expert(trunk, 8)
    for name in SMALL:
        layout = PUBLISHED[name][0]
        full = run([segment(made, layout, layout.names)], layout)[1]
        for i in range(1, len(layout.names)):
            some = layout.names[:i]
            part = Layout(layout.blocks[:i], tuple(r for r in layout.rules if {r.reader, r.target} <= set(some)))
            seg = segment(made, layout, layout.names)
            alone = run(
                [replace(seg, blocks=some, tokens=seg.tokens[:, : part.length], valid=seg.valid[:, : part.length])],
                part,
            )[1]
            same = all(
                torch.allclose(k[:, :, : part.length], a, atol=1e-5) for k, a in zip(full.keys, alone.keys, strict=True)
            )
            assert same == layout.cacheable(*some), (name, some)


@each_position
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_one_token_at_a_time_equals_one_causal_pass(positions: Positions, backend: str) -> None:
    n = 6
    names = [f"t{i}" for i in range(n)]
    steps = Layout(
        tuple(Block(name, 1) for name in names),
        tuple(Rule(names[i], names[j]) for i in range(n) for j in range(i)),
    )
    made = expert(trunk_config(positions, backend=backend), 8)
    whole = segment(made, layouts.causal(n), ("token",))
    (full,), _ = run([whole], layouts.causal(n))
    cache, outputs = None, []
    for i, name in enumerate(names):
        one = Segment(made, (name,), whole.tokens[:, i : i + 1], whole.valid[:, i : i + 1])
        (out,), cache = run([one], steps, cache)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, dim=1), full, atol=1e-5, rtol=1e-5)


@each_position
def test_three_experts_and_three_passes(positions: Positions) -> None:
    trunk = trunk_config(positions)
    parts = [
        segment(expert(trunk, width, seed=i), PI0, blocks)
        for i, (width, blocks) in enumerate([(12, ("image", "text")), (6, ("state",)), (8, ("action",))])
    ]
    together, _ = run(parts, PI0)
    cache = None
    for part, full in zip(parts, together, strict=True):
        (out,), cache = run([part], PI0, cache)
        torch.testing.assert_close(out, full, atol=1e-5, rtol=1e-5)


def test_experts_are_weights_and_nothing_else() -> None:
    """The same expert over two segments is the same expert over one."""
    made = expert(trunk_config(), 8)
    one = segment(made, PI0, PI0.names)
    (whole,), _ = run([one], PI0)
    cut = PI0.slice("state").start
    two = [
        replace(one, blocks=PI0.names[:2], tokens=one.tokens[:, :cut], valid=one.valid[:, :cut]),
        replace(one, blocks=PI0.names[2:], tokens=one.tokens[:, cut:], valid=one.valid[:, cut:]),
    ]
    torch.testing.assert_close(torch.cat(run(two, PI0)[0], dim=1), whole)


@each_position
@pytest.mark.parametrize("name", ["pi0 with two states", "causal", "octo", "insulated", "rt1 small"])
def test_invalid_tokens_are_as_if_absent(positions: Positions, name: str) -> None:
    """Valid tokens come out as from a shorter sequence without the invalid ones; positions count valid tokens."""
    layout = PUBLISHED[name][0]
    made = expert(trunk_config(positions), 8)
    full = segment(made, layout, layout.names, holes=False)
    timed = [b.name for b in layout.blocks if isinstance(b.inner, TimeCausal)]  # steps keep their number of tokens
    gone = [layout.slice(b.name).start + b.length // 2 for b in layout.blocks if b.name not in timed]
    keep = [i for i in range(layout.length) if i not in gone]
    valid = torch.ones(B, layout.length, dtype=torch.bool)
    valid[:, gone] = False
    (out,), _ = run([replace(full, valid=valid)], layout)
    shorter = Layout(
        tuple(b if b.name in timed else replace(b, length=b.length - 1) for b in layout.blocks), layout.rules
    )
    (short,), _ = run([Segment(made, layout.names, full.tokens[:, keep])], shorter)
    torch.testing.assert_close(out[:, keep], short, atol=1e-5, rtol=1e-5)


@each_position
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_poison_in_invalid_tokens_changes_nothing(positions: Positions, backend: str) -> None:
    trunk = trunk_config(positions, backend=backend)
    wide, narrow = expert(trunk, 12), expert(trunk, 8, seed=1)
    first, second = segment(wide, PI0, ("image", "text")), segment(narrow, PI0, ("state", "action"))
    clean = run([first, second], PI0)[0]
    poisoned = [
        replace(s, tokens=torch.where(s.valid[..., None], s.tokens, 1e4)).tokens.requires_grad_()
        for s in (first, second)
    ]
    dirty = run([replace(first, tokens=poisoned[0]), replace(second, tokens=poisoned[1])], PI0)[0]
    for s, one, two in zip((first, second), clean, dirty, strict=True):
        assert torch.equal(one[s.valid], two[s.valid])
    sum(out[s.valid].square().sum() for s, out in zip((first, second), dirty, strict=True)).backward()
    for s, tokens in zip((first, second), poisoned, strict=True):
        assert (tokens.grad[~s.valid] == 0).all()
        assert (tokens.grad[s.valid] != 0).any(-1).all()


@pytest.mark.parametrize("name", SMALL)
def test_tokens_depend_on_what_the_layout_lets_reach_them(name: str) -> None:
    """Through both experts, norms and feed-forwards: the Jacobian of every token has the pattern of the closure."""
    layout = PUBLISHED[name][0]
    trunk = trunk_config(depth=3)
    made = expert(trunk, 8)
    tokens = segment(made, layout, layout.names, holes=False).tokens[:1]

    def network(x: Tensor) -> Tensor:
        return run([Segment(made, layout.names, x)], layout)[0][0].sum((0, 2))

    depends = torch.autograd.functional.jacobian(network, tokens)[:, 0].abs().sum(-1) > 0
    reach = torch.eye(layout.length, dtype=torch.bool)
    for _ in range(trunk.depth):
        reach = reach | ((layout.dense().float() @ reach.float()) > 0)
    assert torch.equal(depends, reach)


def test_expert_without_outputs_gives_the_same_keys_and_costs_less() -> None:
    trunk = trunk_config()
    wide, narrow = expert(trunk, 12), expert(trunk, 8, seed=1)
    reader = Expert(trunk, wide.config, outputs=False)
    assert len(list(reader.parameters())) < len(list(wide.parameters()))
    reader.load_state_dict({k: v for k, v in wide.state_dict().items() if k in reader.state_dict()})
    first, second = segment(wide, PI0, ("image", "text")), segment(narrow, PI0, ("state", "action"))
    quiet = replace(first, expert=reader)
    (_, full), whole = run([first, second], PI0)
    (suffix,), together = run([quiet, second], PI0)
    nothing, cache = run([quiet], PI0)
    (cached,), _ = run([second], PI0, cache)
    assert nothing == ()
    torch.testing.assert_close(suffix, full)
    torch.testing.assert_close(cached, full)
    torch.testing.assert_close(together.keys, whole.keys)


def test_backends_agree() -> None:
    results = []
    for backend in ("reference", "sdpa", "flex"):
        trunk = trunk_config(backend=backend)
        parts = [
            segment(expert(trunk, 12), PI0, ("image", "text")),
            segment(expert(trunk, 8, seed=1), PI0, ("state", "action")),
        ]
        with torch.no_grad():
            results.append(run(parts, PI0)[0])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-5, rtol=1e-5)


def test_cache_is_read_and_never_written() -> None:
    trunk = trunk_config()
    first = segment(expert(trunk, 12), PI0, ("image", "text", "state"))
    second = segment(expert(trunk, 8, seed=1), PI0, ("action",))
    _, cache = run([first], PI0)
    before = [t.clone() for t in cache.keys + cache.values]
    one = run([second], PI0, cache)[0][0]
    two = run([second], PI0, cache)[0][0]
    assert torch.equal(one, two)
    for t, old in zip(cache.keys + cache.values, before, strict=True):
        assert torch.equal(t, old)
    assert cache.columns == ("image", "text", "state")


def test_gradients_through_the_cache_equal_those_of_the_full_pass() -> None:
    trunk = trunk_config()
    wide, narrow = expert(trunk, 12), expert(trunk, 8, seed=1)
    first, second = segment(wide, PI0, ("image", "text")), segment(narrow, PI0, ("state", "action"))
    weights = [*wide.parameters(), *narrow.parameters()]
    full = run([first, second], PI0)[0][1].square().sum()
    cached = run([second], PI0, run([first], PI0)[1])[0][0].square().sum()
    for one, two in zip(
        torch.autograd.grad(full, weights, allow_unused=True),
        torch.autograd.grad(cached, weights, allow_unused=True),
        strict=True,
    ):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_residual_branches_start_small_and_the_stream_does_not_grow_with_depth() -> None:
    torch.manual_seed(0)
    for depth in (2, 8):
        made = Expert(trunk_config(depth=depth, kv_heads=4), ExpertConfig(64, 256))
        for layer in made.layers:
            for linear in (layer.out, layer.ffn.down):
                expected = (linear.in_features * 2 * depth) ** -0.5
                assert float(linear.weight.detach().std()) == pytest.approx(expected, rel=0.15)


MISTAKES = {
    "heads": (lambda: trunk_config(kv_heads=3), ConfigError, "heads divisible by kv_heads, got 4 and 3"),
    "odd head": (lambda: TrunkConfig(1, 1, 1, 3, Rotary()), ConfigError, "even head_dim, got 3"),
    "learned": (
        lambda: run([segment(expert(trunk_config(Learned(5)), 8), PI0, PI0.names)], PI0),
        ConfigError,
        "5 exist",
    ),
    "tokens": (
        lambda: run([replace(segment(expert(trunk_config(), 8), PI0, PI0.names), tokens=torch.zeros(B, 12, 8))], PI0),
        InputError,
        "tokens of image + text + state + action: expected shape (B N D) with N=13, D=8, got (3, 12, 8)",
    ),
    "width": (
        lambda: run([replace(segment(expert(trunk_config(), 8), PI0, PI0.names), tokens=torch.zeros(B, 13, 9))], PI0),
        InputError,
        "D=8",
    ),
    "order": (
        lambda: run([segment(expert(trunk_config(), 8), PI0, (name,)) for name in ("state", "text")], PI0),
        ConfigError,
        "in the order ['image', 'text', 'state', 'action']",
    ),
    "skipped block": (
        lambda: run([segment(expert(trunk_config(), 8), PI0, ("image", "text", "action"))], PI0),
        ConfigError,
        "'action' reads 'state'",
    ),
    "no condition": (
        lambda: run(
            [
                replace(
                    segment(expert(trunk_config(), 8, norm="adaptive_rms", condition=2), PI0, PI0.names), condition=None
                )
            ],
            PI0,
        ),
        ConfigError,
        "expected a condition",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistake_is_answered_with_a_sentence(case: str) -> None:
    make, kind, needle = MISTAKES[case]
    with pytest.raises(kind) as caught:
        make()
    assert needle in str(caught.value)


def test_every_pair_of_positions_differs() -> None:
    """The control: positions of one kind cannot stand in for another, and order matters except to a set."""
    outs = {}
    for name, positions in POSITIONS.items():
        made = expert(trunk_config(positions), 8)
        layout = layouts.bidirectional(token=5)
        x = segment(made, layout, ("token",), holes=False).tokens
        out = run([Segment(made, ("token",), x)], layout)[0][0]
        turned = run([Segment(made, ("token",), x.flip(1))], layout)[0][0].flip(1)
        assert torch.allclose(out, turned, atol=1e-4) == (name == "none")
        outs[name] = out
    for one, two in itertools.combinations(outs.values(), 2):
        assert not torch.allclose(one, two, atol=1e-2)
