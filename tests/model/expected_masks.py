"""Masks written by hand, token by token, from the descriptions of the systems; nothing here uses a ``Layout``.

``PUBLISHED`` pairs each layout with the matrix its authors describe. ``CHAINS`` are layouts in which information
travels through several blocks, ``random_layouts`` draws any layout, ``matrix`` evaluates one by its documented words.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from hypothesis import strategies as st

from vola.model import layouts
from vola.model.layout import Blind, Block, Causal, Full, Layout, Rule, Self, TimeCausal


def cumulative(starts: list[int]) -> np.ndarray:
    """openpi and big_vision: query i sees key j iff as many blocks have started at j as at i, or fewer."""
    c = list(accumulate(starts))
    return np.array([[c[j] <= c[i] for j in range(len(c))] for i in range(len(c))])


def octo(task: int, observation: int, readout: int, steps: int) -> np.ndarray:
    """Task sees task; observations of a step see task and observations not after it; readouts also readouts."""
    tokens = [("task", -1)] * task
    tokens += [("observation", t) for t in range(steps) for _ in range(observation)]
    tokens += [("readout", t) for t in range(steps) for _ in range(readout)]

    def sees(q: tuple[str, int], k: tuple[str, int]) -> bool:
        if q[0] == "task":
            return k[0] == "task"
        if q[0] == "observation":
            return k[0] == "task" or (k[0] == "observation" and k[1] <= q[1])
        return k[0] == "task" or k[1] <= q[1]

    return np.array([[sees(q, k) for k in tokens] for q in tokens])


def rt1(frames: int, image: int, action: int) -> np.ndarray:
    """Lower-triangular, and an action position is blind to every action position, itself included."""
    is_action = ([False] * image + [True] * action) * frames
    n = len(is_action)
    return np.array([[j <= i and not (is_action[i] and is_action[j]) for j in range(n)] for i in range(n)])


def insulated(prefix: int, fast: int, action: int) -> np.ndarray:
    kinds = "p" * prefix + "f" * fast + "a" * action
    mask = np.zeros((len(kinds), len(kinds)), dtype=bool)
    for i, q in enumerate(kinds):
        for j, k in enumerate(kinds):
            if k == "p":
                mask[i, j] = True
            elif q == k == "f":
                mask[i, j] = j <= i
            elif q == k == "a":
                mask[i, j] = True
    return mask


def decision_transformer(n: int) -> np.ndarray:
    """Causal over (R_0, s_0, a_0, R_1, s_1, a_1, ...), rearranged to all R, all s, all a."""
    place = [3 * t + modality for modality in range(3) for t in range(n)]
    return np.array([[k <= q for k in place] for q in place])


def act(latent: int, state: int, image: int, action: int) -> np.ndarray:
    """Encoder full over its memory; decoder full self- and cross-attention."""
    memory = latent + state + image
    n = memory + action
    return np.array([[j < memory or i >= memory for j in range(n)] for i in range(n)])


PUBLISHED: dict[str, tuple[Layout, np.ndarray]] = {
    "pi0": (layouts.pi0(4, 3, 1, 5), cumulative([0] * 7 + [1] + [1, 0, 0, 0, 0])),
    "pi0 with two states": (layouts.pi0(4, 3, 2, 5), cumulative([0] * 7 + [1, 0] + [1, 0, 0, 0, 0])),
    "pi0 without cameras": (layouts.pi0(0, 3, 1, 2), cumulative([0, 0, 0, 1, 1, 0])),
    "pi0 at full size": (layouts.pi0(768, 48, 1, 50), cumulative([0] * 816 + [1] + [1] + [0] * 49)),
    "pi05": (layouts.pi05({"image": 4, "text": 3}, 3), cumulative([0] * 7 + [1, 0, 0])),
    "pi05 one prefix": (layouts.pi05(7, 3), cumulative([0] * 7 + [1, 0, 0])),
    "prefix_lm": (layouts.prefix_lm(4, 3), cumulative([0] * 4 + [1] * 3)),
    "pi0_fast": (layouts.prefix_lm({"image": 3, "text": 2}, 4), cumulative([0] * 5 + [1] * 4)),
    "causal": (layouts.causal(6), np.array([[j <= i for j in range(6)] for i in range(6)])),
    "oft": (layouts.oft(4, 1, 3, 5), np.full((13, 13), True)),
    "cvae encoder": (layouts.bidirectional(cls=1, state=1, action=4), np.full((6, 6), True)),
    "octo": (layouts.octo(3, 2, 1, 4), octo(3, 2, 1, 4)),
    "octo with more readouts": (layouts.octo(2, 3, 2, 2), octo(2, 3, 2, 2)),
    "rt1": (layouts.rt1(6, 8, 11), rt1(6, 8, 11)),
    "rt1 small": (layouts.rt1(2, 3, 2), rt1(2, 3, 2)),
    "insulated": (layouts.insulated({"image": 4, "text": 3}, 3, 5), insulated(7, 3, 5)),
    "act": (layouts.act(image=4, action=5), act(1, 1, 4, 5)),
    "decision_transformer": (layouts.decision_transformer(4), decision_transformer(4)),
}
SMALL = [name for name, (layout, _) in PUBLISHED.items() if layout.length <= 20]

CHAINS: dict[str, Layout] = {
    "chain": Layout(tuple(Block(name, 2) for name in "abcd"), (Rule("a", "b"), Rule("b", "c"), Rule("c", "d"))),
    "blind relay": Layout((Block("a", 1), Block("b", 2, Blind()), Block("c", 1)), (Rule("a", "b"), Rule("b", "c"))),
    "time before": Layout(
        (Block("a", 2, TimeCausal(2)), Block("b", 2, TimeCausal(2)), Block("c", 2, TimeCausal(2))),
        (Rule("a", "b", "before"), Rule("b", "c", "before")),
    ),
    "one step before": Layout(
        (Block("a", 2, TimeCausal(1)), Block("b", 1, TimeCausal(1))), (Rule("a", "b", "before"),)
    ),
    "selves": Layout((Block("a", 3, Self()), Block("b", 2, Self())), (Rule("b", "a"),)),
}


def matrix(layout: Layout) -> np.ndarray:
    """The matrix that the documented words mean, by loops over tokens."""
    tokens = [(block, offset) for block in layout.blocks for offset in range(block.length)]
    rules = {(rule.reader, rule.target): rule.when for rule in layout.rules}

    def time(block: Block, offset: int) -> int:
        assert isinstance(block.inner, TimeCausal)
        return offset // (block.length // block.inner.steps)

    def sees(q: tuple[Block, int], k: tuple[Block, int]) -> bool:
        (a, i), (b, j) = q, k
        if a is not b:
            when = rules.get((a.name, b.name))
            if when in (None, "always"):
                return when is not None
            return time(b, j) <= time(a, i) if when == "not_after" else time(b, j) < time(a, i)
        match a.inner:
            case Full():
                return True
            case Causal():
                return j <= i
            case Self():
                return j == i
            case Blind():
                return False
        return time(a, j) <= time(a, i)

    return np.array([[sees(q, k) for k in tokens] for q in tokens])


@st.composite
def random_layouts(draw: st.DrawFn, max_blocks: int = 4) -> Layout:
    names = ("image", "text", "state", "action")[: draw(st.integers(1, max_blocks))]
    steps = draw(st.integers(1, 3))
    blocks = []
    for name in names:
        inner = draw(st.sampled_from([Full(), Causal(), Self(), Blind(), TimeCausal(steps), TimeCausal(steps)]))
        length = draw(st.integers(1, 2)) * steps if isinstance(inner, TimeCausal) else draw(st.integers(1, 4))
        blocks.append(Block(name, length, inner))
    rules = []
    for a in blocks:
        for b in blocks:
            timed = isinstance(a.inner, TimeCausal) and isinstance(b.inner, TimeCausal)
            when = draw(st.sampled_from([None, "always", *(["not_after", "before"] if timed else [])]))
            if a is not b and when is not None:
                rules.append(Rule(a.name, b.name, when))
    return Layout(tuple(blocks), tuple(draw(st.permutations(rules))))
