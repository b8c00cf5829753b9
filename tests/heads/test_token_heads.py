"""Token heads: cached writing equals scoring the whole, probabilities sum to one, padding and neighbours do nothing."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tools import SPEC, batch, fitted, policy, rngs, system
from vola import checkpoint
from vola.errors import ConfigError
from vola.heads.categorical import Autoregressive, Categorical
from vola.heads.fast import Fast
from vola.heads.pairing import sampling_settings
from vola.heads.regression import Regression
from vola.heads.tokens import pick_ids, write
from vola.model.networks import ExpertNetwork
from vola.model.token_networks import TextTokens, TokenExpert
from vola.model.trunk import ExpertConfig
from vola.policy import Policy
from vola.system import System
from vola.tokenizers.actions import Tokens
from vola.tokenizers.bins import QuantileBins, UniformBins
from vola.tokenizers.fast import FastConfig
from vola.types import Chunk, select

EXPERT = ExpertConfig(8, 8)


@dataclass(frozen=True)
class Huber:
    """A rule that the library does not know."""


PAIRS = {
    "parallel": (Categorical(UniformBins(5)), ExpertNetwork(EXPERT, "none")),
    "autoregressive": (Autoregressive(UniformBins(5)), TokenExpert(EXPERT)),
    "quantile": (Autoregressive(QuantileBins(4), pick="argmax"), TokenExpert(EXPERT)),
    "text": (Autoregressive(UniformBins(5)), TextTokens()),
    "fast": (Fast(FastConfig(scale=2.0, vocabulary=40), pick="sample"), TokenExpert(EXPERT)),
    "fast as text": (Fast(FastConfig(scale=2.0, vocabulary=40, on_malformed="repair")), TextTokens()),
}
WRITERS = [name for name in PAIRS if name != "parallel"]


def make(name: str, **changes: object) -> System:
    rule, network = PAIRS[name]
    return system(head=rule, network=network, normalise_actions="min_max", **changes)


def made(name: str, **changes: object) -> Policy:
    return policy(make(name, **changes))


@pytest.mark.parametrize("name", WRITERS)
def test_cached_writing_equals_full_recomputation(name: str) -> None:
    p, b = made(name), batch(make(name))
    inputs = p.prepare(b.observation)
    with torch.no_grad():
        fast, slow = (p.backbone(inputs, cached=c) for c in (True, False))
        # Every score along the way, not only the ids picked from it.
        states = [p.head.network.begin(c) for c in (fast, slow)]
        ids = torch.arange(3 * p.head.network.length).view(3, -1) % p.head.network.vocabulary
        whole = p.head.network(fast, ids)
        for i in range(p.head.network.length):
            scores = []
            for c, context in enumerate((fast, slow)):
                score, states[c] = p.head.network.step(context, states[c])
                states[c] = p.head.network.append(states[c], ids[:, i])
                scores.append(score)
            torch.testing.assert_close(scores[0], scores[1], atol=2e-6, rtol=1e-5)
            torch.testing.assert_close(scores[0], whole[:, i], atol=2e-6, rtol=1e-5)
    one, two = p.plan(b.observation, rngs(3)), p.plan(b.observation, rngs(3), cached=False)
    np.testing.assert_array_equal(one.actions, two.actions)


@pytest.mark.parametrize("name", WRITERS)
def test_a_score_does_not_depend_on_its_own_or_later_tokens(name: str) -> None:
    p, b = made(name), batch(make(name))
    with torch.no_grad():
        context = p.backbone(p.prepare(b.observation))
        L, K = p.head.network.length, p.head.network.vocabulary
        ids = torch.zeros(3, L, dtype=torch.long)
        base = p.head.network(context, ids)
        for i in range(L):
            changed = ids.clone()
            changed[:, i:] = K - 1
            scores = p.head.network(context, changed)
            torch.testing.assert_close(scores[:, : i + 1], base[:, : i + 1], atol=0, rtol=0)
            if i + 1 < L:
                assert (scores[:, i + 1] - base[:, i + 1]).abs().max() > 1e-5


def test_probabilities_of_all_sequences_sum_to_one() -> None:
    """H = 1, A = 2, K = 3: nine chunks; also the marginal of an autoregressive sampler matches its log_prob."""
    for name in ("parallel", "autoregressive"):
        rule, network = PAIRS[name]
        changes = {"H": 1, "execute__k": 1, "head": replace(rule, bins=UniformBins(3)), "network": network}
        p = policy(system(normalise_actions="min_max", **changes))
        b = batch(system(H=1, execute__k=1), B=1)
        with torch.no_grad():
            context = p.backbone(p.prepare(b.observation))
            centres = torch.tensor([-2 / 3, 0.0, 2 / 3])
            valid, generator = torch.ones(1, 1, dtype=torch.bool), torch.Generator()
            total = 0.0
            for x, y in itertools.product(centres, centres):
                chunk = torch.stack([x, y]).view(1, 1, 2)
                total += float(p.head.log_prob(context, chunk, valid, generator).exp())
        assert total == pytest.approx(1, abs=1e-5)


def test_sampling_follows_the_probabilities() -> None:
    p = policy(
        system(
            H=1,
            execute__k=1,
            normalise_actions="min_max",
            head=Autoregressive(UniformBins(3)),
            network=PAIRS["text"][1],
        )
    )
    n = 4000
    b = batch(system(H=1, execute__k=1), B=1)
    many = select(b.observation, np.zeros(n, np.int64))
    with torch.no_grad():
        context = p.backbone(p.prepare(many))
        drawn = write(p.head.network, context, [np.random.default_rng(i) for i in range(n)], "sample", 1.0, None)
        one = p.backbone(p.prepare(b.observation))
        for first, second in itertools.product(range(3), range(3)):
            ids = torch.tensor([[first, second]])
            scores = p.head.network.choices(p.head.network(one, ids)).log_softmax(-1)
            expected = float((scores[0, 0, first] + scores[0, 1, second]).exp())
            measured = float(((drawn.ids == [first, second]).all(axis=1)).mean())
            assert measured == pytest.approx(expected, abs=4 * (expected * (1 - expected) / n) ** 0.5 + 1e-3)


@pytest.mark.parametrize("name", PAIRS)
def test_padded_steps_and_other_samples_change_nothing(name: str) -> None:
    p, b = made(name), batch(make(name))
    valid = b.chunk.valid.copy()
    valid[0, 2:] = False
    poisoned = b.chunk.actions.copy()
    poisoned[0, 2:] = 1e6

    def gradients(chunk: Chunk) -> list[torch.Tensor]:
        p.zero_grad()
        p.loss(replace(b, chunk=chunk), torch.Generator().manual_seed(0)).mean().backward()
        return [q.grad.clone() for q in p.parameters() if q.grad is not None]

    for clean, dirty in zip(gradients(Chunk(b.chunk.actions, valid)), gradients(Chunk(poisoned, valid)), strict=True):
        assert torch.equal(clean, dirty)
    alone = p.plan(select(b.observation, np.array([0])), rngs(3)[:1])
    together = p.plan(b.observation, rngs(3))
    np.testing.assert_allclose(alone.actions[0], together.actions[0], atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_every_weight_of_the_head_learns(name: str) -> None:
    p, b = made(name), batch(make(name))
    p.loss(b, torch.Generator()).mean().backward()
    silent = [n for n, q in p.head.named_parameters() if q.grad is None or not q.grad.abs().max() > 0]
    assert not silent


def test_text_tokens_share_the_words_matrix() -> None:
    p, b = made("text"), batch(make("text"))
    assert [n for n, _ in p.head.named_parameters()] == ["network.start"]
    words = p.backbone.language.vocabulary
    assert words == len(p.tokenizer.words) + 5
    ids = torch.arange(5)[None]
    context = p.backbone(p.prepare(b.observation))
    assert p.head.network.column(context, ids).tolist() == [[words - 1 - i for i in range(5)]]
    scores = torch.zeros(1, words)
    scores[0, words - 1 - 3] = 1.0  # the word of action token 3
    assert p.head.network.choices(scores).argmax() == 3
    scores[0, 0] = 9.0  # a word that is no action is never written on a robot prompt
    assert p.head.network.choices(scores).argmax() == 3


def test_picks() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0]]).log_softmax(-1)
    edges = scores.exp().cumsum(-1)[0]
    for u, wanted in ((0.0, 0), (float(edges[0]) + 1e-6, 1), (float(edges[1]) + 1e-6, 2), (1 - 1e-12, 2)):
        assert pick_ids(scores, "sample", 1.0, torch.tensor([u], dtype=torch.float64)).item() == wanted
    assert pick_ids(scores, "argmax", 1.0, None).item() == 1
    assert pick_ids(scores, "sample", 1e-3, torch.tensor([0.5], dtype=torch.float64)).item() == 1


def test_a_sequence_that_does_not_decode_is_reported_and_carries_no_decision() -> None:
    p, b = made("fast"), batch(make("fast"))

    def write_nonsense(*_: object, **__: object) -> Tokens:
        return Tokens(np.full((3, 1), p.head.tokenizer.end), np.ones((3, 1), bool))

    import vola.heads.fast as module

    original = module.write
    module.write = write_nonsense  # type: ignore[assignment]
    try:
        chunk = p.plan(b.observation, rngs(3))
    finally:
        module.write = original
    assert chunk.malformed is not None
    assert chunk.malformed.all()
    assert not chunk.valid.any()
    assert (chunk.actions == 0).all()  # displacements: it stands still, whatever zero is in normalised units


def test_nonsensical_pairs_are_refused_at_construction_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="needs a network that scores them"):
        system(head=Autoregressive(), network=ExpertNetwork(EXPERT, "none"), normalise_actions="min_max")
    with pytest.raises(ConfigError, match="wants a whole chunk per pass"):
        system(head=Regression(), network=TokenExpert(EXPERT))
    with pytest.raises(ConfigError, match="does not keep actions there"):
        system(head=Categorical(), network=ExpertNetwork(EXPERT, "none"))
    with pytest.raises(ConfigError, match="holds? normalised actions within 2"):
        policy(system("diffusion", head__clip=2.0, normalise_actions="mean_std"))
    policy(system("diffusion", head__clip=20.0, normalise_actions="mean_std"))
    with pytest.raises(ConfigError, match="temperature > 0"):
        Autoregressive(temperature=0.0)
    made_ = make("autoregressive")
    bare = replace(fitted(made_), action_tokenizer=None)
    with pytest.raises(ConfigError, match="holds? none"):
        made_.build(bare)


def test_floor_is_the_bins_error_in_physical_units() -> None:
    p = made("autoregressive")
    floor = p.head.floor(p.action_normaliser)
    np.testing.assert_allclose(floor.rms, p.action_normaliser.scale * (2 / 5) / 12**0.5, rtol=1e-6)
    np.testing.assert_allclose(floor.worst, p.action_normaliser.scale / 5, rtol=1e-6)
    assert p.head.cost().serial == 4 * SPEC.action.size
    assert made("parallel").head.cost().serial == 1


def test_trained_settings_are_refused_after_training(tmp_path: Path) -> None:
    """What training fixed cannot be changed for an evaluation, even where the weights would still fit."""
    made_, p = make("autoregressive"), made("autoregressive")
    fit = fitted(made_)
    folder = checkpoint.save(tmp_path, made_, fit, p.state_dict(), checkpoint.TrainingState(1, p.state_dict(), {}))
    loaded = checkpoint.load(folder)
    assert checkpoint.with_changes(loaded, {"head.pick": "argmax", "execute.k": 1}).system.execute.k == 1
    for name, value in (("head.bins.K", 6), ("head", Regression()), ("train.lr", 1.0), ("H", 2)):
        with pytest.raises(ConfigError, match="fixed by training"):
            checkpoint.with_changes(loaded, {name: value})
    flow = system("flow")
    assert sampling_settings(flow.head) == ("head.steps", "head.solver")
    with pytest.raises(ConfigError, match="prefix < H = 4"):
        flow.override({"head.prefix": 4})
    with pytest.raises(ConfigError, match="expected one of .* got Huber"):
        replace(flow, head=Huber())
