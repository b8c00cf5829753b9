"""The layouts of the published systems, as values. Lengths are numbers of tokens.

Where a system's prefix is a matter of taste, ``prefix`` is either one length (a block named "prefix") or a mapping
of block names to lengths in sequence order; the blocks of a prefix see each other fully.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from vola.errors import ConfigError
from vola.model.layout import Blind, Block, Causal, Full, Inner, Layout, Rule, TimeCausal, When

FULL = Full()


def _reads(reader: str, targets: Iterable[str], when: When = "always") -> tuple[Rule, ...]:
    return tuple(Rule(reader, target, when) for target in targets)


def _mutual(names: Iterable[str]) -> tuple[Rule, ...]:
    names = tuple(names)
    return tuple(Rule(a, b) for a in names for b in names if a != b)


def _prefix(prefix: int | Mapping[str, int]) -> dict[str, int]:
    lengths = dict(prefix) if isinstance(prefix, Mapping) else {"prefix": prefix}
    if not lengths:
        raise ConfigError("layout: expected a prefix of at least one block, got none")
    return lengths


def bidirectional(**blocks: int) -> Layout:
    """Everybody sees everybody (an encoder; keyword order is sequence order)."""
    return Layout(tuple(Block(name, n) for name, n in blocks.items()), _mutual(blocks))


def causal(n: int) -> Layout:
    """One block "token" of n, lower-triangular: GPT, and OpenVLA (arXiv 2406.09246), whose patches are causal too."""
    return Layout((Block("token", n, Causal()),))


def prefix_lm(prefix: int | Mapping[str, int], suffix: int) -> Layout:
    """A fully visible prefix and a causal block "suffix".

    Source: T5 (arXiv 1910.10683, fig. 4); PaliGemma and pi0-FAST (arXiv 2501.09747): images and prompt are the prefix,
    everything from "Action: " on is the suffix.
    """
    lengths = _prefix(prefix)
    blocks = tuple(Block(name, n) for name, n in lengths.items()) + (Block("suffix", suffix, Causal()),)
    return Layout(blocks, _mutual(lengths) + _reads("suffix", lengths))


def observed(image: int, text: int, state: int, readout: int = 0, action: int = 0, inner: Inner = FULL) -> Layout:
    """[image text] -> [state] -> [readout] and [action], which do not see each other; each sees the earlier ones.

    The prefix of every head in this library: readout tokens collect what a head outside the trunk needs and nobody
    reads them (Octo); the action block, full or causal, belongs to a head inside the trunk. A length of 0 leaves the
    block out: a robot without cameras has no image block, one without sensors of its own no state block.
    """
    blocks = [Block("image", image)] if image else []
    blocks.append(Block("text", text))
    names = tuple(block.name for block in blocks)
    rules = _mutual(names)
    if state:
        rules += _reads("state", names)
        blocks, names = [*blocks, Block("state", state)], (*names, "state")
    if readout:
        rules, blocks = rules + _reads("readout", names), [*blocks, Block("readout", readout)]
    if action:
        rules, blocks = rules + _reads("action", names), [*blocks, Block("action", action, inner)]
    return Layout(tuple(blocks), rules)


def pi0(image: int, text: int, state: int, action: int) -> Layout:
    """[image text] -> [state] -> [action]: full inside each, and each sees the earlier ones, never a later one.

    A robot without cameras (``image`` 0) or without sensors of its own (``state`` 0) has no such block.

    Source: pi0 (arXiv 2410.24164, appendix B) and openpi, where it is a cumulative sum over block starts.
    """
    return observed(image, text, state, action=action)


@lru_cache(maxsize=1024)
def writing(layout: Layout, name: str, done: int, new: int) -> Layout:
    """A layout whose last, causal block ``name`` is being written: ``done`` tokens of it, then ``new`` as "next".

    What autoregressive decoding runs under, token by token; the mask of the last rows is that of the full layout.

    Raises:
        ConfigError: the block is not the last one, not causal, or shorter than that.
    """
    block = layout.block(name)
    if layout.blocks[-1] != block or not isinstance(block.inner, Causal) or not 0 < done + new <= block.length:
        raise ConfigError(
            f"layout: expected {name!r} to be the last block, causal and of at least {done + new} tokens, got {block} "
            f"in {list(layout.names)}"
        )
    others = tuple(rule for rule in layout.rules if rule.reader != name)
    targets = tuple(rule.target for rule in layout.rules if rule.reader == name)
    blocks, rules = layout.blocks[:-1], others
    if done:
        blocks, rules = (*blocks, Block(name, done, Causal())), rules + _reads(name, targets)
    if new:
        blocks = (*blocks, Block("next", new, Causal()))
        rules += _reads("next", (*targets, name) if done else targets)
    return Layout(blocks, rules)


def pi05(prefix: int | Mapping[str, int], action: int) -> Layout:
    """[prefix] -> [action], full inside each: the state is text in the prefix.

    Source: pi0.5 (arXiv 2504.16054) as released in openpi.
    """
    lengths = _prefix(prefix)
    blocks = tuple(Block(name, n) for name, n in lengths.items()) + (Block("action", action),)
    return Layout(blocks, _mutual(lengths) + _reads("action", lengths))


def insulated(prefix: int | Mapping[str, int], fast: int, action: int) -> Layout:
    """[prefix] -> [fast] causal and [prefix] -> [action] full; discrete and continuous actions never see each other.

    Source: knowledge insulation (arXiv 2505.23705) and pi0.5's joint training. The stop-gradient from the expert into
    the prefix is not a matter of the layout.
    """
    lengths = _prefix(prefix)
    blocks = tuple(Block(name, n) for name, n in lengths.items())
    blocks += Block("fast", fast, Causal()), Block("action", action)
    return Layout(blocks, _mutual(lengths) + _reads("fast", lengths) + _reads("action", lengths))


def octo(task: int, observation_per_step: int, readout_per_step: int, steps: int) -> Layout:
    """task | observation, step after step | readout, step after step.

    Task tokens see themselves; observations the task and observations not after them; readouts also the readouts not
    after them, and nobody else sees a readout. Octo's code interleaves observations and readouts in the sequence; with
    its learned positions the order of blocks is free. Source: Octo (arXiv 2405.12213) with the corrected mask of 1.5.
    """
    time = TimeCausal(steps)
    blocks = (
        Block("task", task),
        Block("observation", observation_per_step * steps, time),
        Block("readout", readout_per_step * steps, time),
    )
    rules = (Rule("observation", "task"), Rule("readout", "task"), Rule("readout", "observation", "not_after"))
    return Layout(blocks, rules)


def rt1(frames: int, image_tokens: int, action_tokens: int) -> Layout:
    """image0 | action0 | image1 | action1 | ...: lower-triangular, and action slots are blind to all action slots.

    Source: RT-1 (arXiv 2212.06817) in its released code (6 frames, 8 image and 11 action tokens), where the inputs of
    the action slots are zero, so actions are not autoregressive. The logits of a slot are read one position earlier,
    as in any causal model.
    """
    blocks: tuple[Block, ...] = ()
    rules: tuple[Rule, ...] = ()
    for t in range(frames):
        images, actions = [f"image{i}" for i in range(t)], [f"action{i}" for i in range(t)]
        rules += _reads(f"image{t}", images + actions) + _reads(f"action{t}", [*images, f"image{t}"])
        blocks += Block(f"image{t}", image_tokens, Causal()), Block(f"action{t}", action_tokens, Blind())
    return Layout(blocks, rules)


def act(image: int, action: int, state: int = 1, latent: int = 1) -> Layout:
    """latent | state | image as the encoder's memory, full; action queries see the memory and each other.

    Source: ACT (arXiv 2304.13705). Its decoder reads the encoder's last layer, not the layer beside it; who may look
    at whom is the same. ACT's CVAE encoder is ``bidirectional(cls=1, state=1, action=H)`` with padded steps invalid.
    """
    memory = {"latent": latent, "state": state, "image": image}
    return pi05(memory, action)


def oft(image: int, state: int, text: int, action: int) -> Layout:
    """image | state | text | action placeholders, everybody sees everybody: parallel decoding.

    Count BOS and stop tokens with the block they stand beside. Source: OpenVLA-OFT (arXiv 2502.19645).
    """
    return bidirectional(image=image, state=state, text=text, action=action)


def decision_transformer(n: int) -> Layout:
    """Causal over n interleaved triples (return, state, action), kept as three blocks of n tokens each.

    A block per modality lets each be embedded and read out by its slice; seen in interleaved order (token 3t + i is
    token t of block i) the matrix is the lower triangle. Source: Decision Transformer (arXiv 2106.01345), which has
    no positions but an embedding of t, so the order of blocks is free.
    """
    names = ("return", "state", "action")
    rules = tuple(
        Rule(a, b, "not_after" if j < i else "before")
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i != j
    )
    return Layout(tuple(Block(name, n, TimeCausal(n)) for name in names), rules)
