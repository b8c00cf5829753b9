"""Faults that users of other toolkits reported, as tests: tokenizer, mask/model and chunking items without a better
place. The others stand beside the part they are about (grep for the id, e.g. ``test_T07_``).

Not applicable here, with the reason: T11 (a long instruction truncates the state or the action marker): nothing is ever
truncated, instructions of any length are encoded whole, and a position table that is too short refuses
(``test_T11_...``). T14 (training and inference prompts differ): there is one ``Policy.prepare``; the test says so. M11
(adapter weights dropped in conversion): there are no adapters yet; ``checkpoint.load_weights`` refuses every tensor it
does not use (``test_M10_...`` in test_train.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tools import SPEC, batch, dataset, fitted, policy, rngs, system, windows
from vola import checkpoint
from vola.checkpoint import TrainingState
from vola.data.windows import Windows
from vola.errors import CheckpointError, ConfigError
from vola.heads.categorical import Autoregressive
from vola.heads.fast import Fast
from vola.model.positions import Learned
from vola.model.token_networks import TextTokens, TokenExpert
from vola.model.trunk import ExpertConfig
from vola.rollout.rollout import _Window
from vola.tokenizers.bins import UniformBins
from vola.tokenizers.fast import FastConfig
from vola.types import Chunk, Observation

EXPERT = ExpertConfig(8, 8)
FAST = {
    "head": Fast(FastConfig(scale=2.0, vocabulary=40)),
    "network": TokenExpert(EXPERT),
    "normalise_actions": "min_max",
}


def test_T10_the_targets_end_with_the_end_token_and_writing_stops_there() -> None:
    """A tiny model overfit on one chunk stops at the right length instead of running to the longest."""
    made = system(**FAST)
    p, b = policy(made), batch(made, B=1)
    tokens = p.head.tokenizer.encode(p.targets(b).numpy(), b.chunk.valid)
    assert tokens.ids[0, -1] == p.head.tokenizer.end
    assert tokens.valid[0, -1]
    p.train()
    optimiser = torch.optim.Adam(p.parameters(), 1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        loss = p.loss(b, torch.Generator()).mean()
        loss.backward()
        optimiser.step()
    assert loss < 0.05
    drawn = p.eval().plan(b.observation, rngs(1))
    assert drawn.malformed is not None
    assert not drawn.malformed.any()
    decoded = p.head.tokenizer.decode(tokens, made.H, SPEC.action.size).chunks
    np.testing.assert_allclose(drawn.actions, p.action_normaliser.decode(decoded), atol=1e-5)
    assert tokens.ids.shape[1] < p.head.network.length


def test_T11_a_long_instruction_is_never_cut() -> None:
    """5,000 words change the plan by their last word; a position table that is too short is refused."""
    made = system(trunk__positions=Learned(6000))
    p, b = policy(made), batch(made, B=1)
    text = " ".join(["push the red disc"] * 1250)
    plans = [
        p.plan(replace(b.observation, instruction=(f"{text} {last}",)), rngs(1)).actions for last in ("blue", "red")
    ]
    assert np.abs(plans[0] - plans[1]).max() > 0
    short = policy(system(trunk__positions=Learned(64)))
    with pytest.raises(ConfigError, match="learned positions"):
        short.plan(replace(b.observation, instruction=(text,)), rngs(1))


def test_T14_one_prompt_for_training_and_inference() -> None:
    """Trailing spaces and line ends change nothing, and both paths give the same ids."""
    p, b = policy(system()), batch(system(), B=1)
    texts = ("push the red disc", "push the red disc \n", "  Push the RED disc")
    ids = [p.prepare(replace(b.observation, instruction=(text,))).words for text in texts]
    assert all(torch.equal(ids[0], other) for other in ids[1:])


def test_M03_steps_past_the_end_are_no_targets() -> None:
    """An episode of 5 with a chunk of 8: what stands past its end changes the loss by nothing."""
    made = system("regression", H=8)
    data = dataset((5,))
    w = Windows(data, [0], made.T, 8, resize=made.image_size)
    p = policy(made)
    b = w.batch(np.arange(5))
    assert b.chunk.valid.sum(axis=1).tolist() == [5, 4, 3, 2, 1]
    moved = np.where(b.chunk.valid[..., None], b.chunk.actions, 100.0).astype(np.float32)
    one = p.loss(b, torch.Generator()).mean()
    two = p.loss(replace(b, chunk=Chunk(moved, b.chunk.valid)), torch.Generator()).mean()
    assert torch.equal(one, two)


def test_M05_a_window_holds_real_past_frames_and_starts_again_after_a_reset() -> None:
    """Observations 1, 2, 3, ... through a window of 4: the mean of what is valid is 1, 1.5, 2, 2.5, 3.5."""

    def seen(value: float) -> Observation:
        ones = np.ones((1, 1), bool)
        return Observation({}, {}, np.full((1, 1, 1), value, np.float32), ones, ("go",))

    for _ in range(2):
        window, means = _Window(4), []
        for value in (1, 2, 3, 4, 5):
            o = window.push(seen(value))
            means.append(float(o.state[o.state_valid].mean()))
        assert means == [1, 1.5, 2, 2.5, 3.5]


def test_M08_the_chunk_length_is_not_the_executed_length() -> None:
    made = system(H=6, execute__k=2)
    assert policy(made).plan(batch(made).observation, rngs(3)).actions.shape == (3, 6, 2)
    with pytest.raises(ConfigError, match="no 'stepps'"):
        system(head__stepps=3)


@pytest.mark.parametrize(
    ("path", "one", "two"),
    [
        ("head.steps", 2, 3),
        ("head.solver", "euler", "midpoint"),
        ("network.time", "concat", "adaptive"),
        ("network.expert.hidden", 8, 16),
        ("network.expert.activation", "gelu", "geglu"),
        ("network.expert.bias", False, True),
        ("trunk.depth", 1, 2),
        ("trunk.kv_heads", 1, 2),
        ("T", 1, 2),
        ("H", 4, 5),
        ("normalise_actions", "mean_std", "min_max"),
        ("normalise_state", "mean_std", "quantile"),
    ],
)
def test_M08_every_setting_changes_the_plan_or_the_shape(path: str, one: object, two: object) -> None:
    plans = []
    for value in (one, two):
        changes = {path: value}
        if value == "adaptive":
            changes["network.expert"] = ExpertConfig(8, 8, norm="adaptive_rms", condition=8)
        made = system().override(changes)
        plans.append(policy(made).plan(batch(made).observation, rngs(3)).actions)
    assert plans[0].shape != plans[1].shape or np.abs(plans[0] - plans[1]).max() > 1e-6


def test_M15_a_shared_embedding_is_saved_once_and_restored(tmp_path: Path) -> None:
    made = system(head=Autoregressive(UniformBins(5)), network=TextTokens(), normalise_actions="min_max")
    p, fit = policy(made), fitted(made)
    folder = checkpoint.save(tmp_path, made, fit, p.state_dict(), TrainingState(1, p.state_dict(), {}))
    loaded = checkpoint.load(folder).policy
    b = batch(made)
    np.testing.assert_array_equal(loaded.plan(b.observation, rngs(3)).actions, p.plan(b.observation, rngs(3)).actions)
    names = [n for n in p.state_dict() if "embedding" in n]
    assert names == ["backbone.language.embedding.weight"]
    renamed = {n.replace("backbone.", "model.", 1): v for n, v in p.state_dict().items()}
    with pytest.raises(CheckpointError):
        checkpoint.load_weights(loaded, renamed, "renamed")


def test_C12_every_frame_starts_a_sample_and_short_episodes_have_one_valid_step() -> None:
    """Lengths 1, 3, 10 with a chunk of 8: sum(ceil(L / stride)) samples, none without a valid step."""
    data = dataset((1, 3, 10))
    for stride, count in ((1, 14), (2, 8), (4, 5)):
        w = Windows(data, [0, 1, 2], 1, 8, stride=stride)
        assert len(w) == count == sum(-(-n // stride) for n in (1, 3, 10))
        b = w.batch(np.arange(len(w)))
        assert b.chunk.valid[:, 0].all()
    first = windows(system(H=8), data).batch([0])
    assert first.chunk.valid[0].tolist() == [True] + [False] * 7
