"""What must not matter changes nothing, what must matter does; cached equals uncached; one preprocessing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tools import SPEC, batch, policy, rngs, system
from vola.data.transforms import RelativeActions, Transforms, resize_images
from vola.errors import InputError, NonFiniteError
from vola.model.positions import Learned, NoPositions, Rotary, Sinusoidal
from vola.model.trunk import ExpertConfig
from vola.types import Batch, Chunk, select
from vola.variants import HEADS

VARIANTS = {
    "pi0": {},
    "regression": {"name": "regression"},
    "adaptive": {
        "network__expert": ExpertConfig(8, 8, norm="adaptive_rms", activation="geglu", condition=8),
        "network__time": "adaptive",
    },
    "rotary": {"trunk__positions": Rotary(), "network__expert": ExpertConfig(8, 8, activation="swiglu")},
    "sinusoidal": {"trunk__positions": Sinusoidal(), "backbone__expert": ExpertConfig(8, 8, norm="layer", bias=True)},
    "set": {"trunk__positions": NoPositions(), "T": 2},
    "window": {"T": 3, "trunk__positions": Learned(64), "head__time": "beta"},
    "patch tokens": {"backbone__vision__patch_tokens": True},
    "reference": {"trunk__backend": "reference"},
    **{head: {"name": head} for head in HEADS},
    "relative": {"transforms": Transforms((RelativeActions(((0, 0), (1, 1))),))},
}


def make(variant: str):
    changes = dict(VARIANTS[variant])
    return system(changes.pop("name", "pi0"), **changes)


def loss_values(p, b: Batch, seed: int = 0) -> torch.Tensor:
    return p.loss(b, torch.Generator().manual_seed(seed)).main.values


@pytest.mark.parametrize("variant", VARIANTS)
def test_cached_plan_equals_uncached(variant: str) -> None:
    p, b = policy(make(variant)), batch(make(variant))
    fast = p.plan(b.observation, rngs(3)).actions
    slow = p.plan(b.observation, rngs(3), cached=False).actions
    assert np.abs(fast).max() > 1e-3
    np.testing.assert_allclose(fast, slow, atol=1e-6)


def answers(p, b: Batch, o) -> np.ndarray:
    """The plan and, because tokens are picked in steps, what the head thinks of the batch's own actions."""
    loss = p.loss(replace(b, observation=o), torch.Generator().manual_seed(0)).main.values
    return np.concatenate([p.plan(o, rngs(3)).actions.ravel(), loss.detach().numpy().ravel()])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_input_matters(variant: str) -> None:
    """The control for the poison tests: image, words and state all change the answer."""
    p, b = policy(make(variant)), batch(make(variant))
    o = b.observation
    base = answers(p, b, o)
    darker = replace(o, images={k: v // 2 for k, v in o.images.items()})
    moved = replace(o, state=o.state + 1)
    told = replace(o, instruction=("go to the blue ring", "push the red disc", "push the blue ring"))
    for other in (darker, moved, told):
        assert np.abs(answers(p, b, other) - base).max() > 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_invalid_camera_changes_nothing(variant: str) -> None:
    p, b = policy(make(variant)), batch(make(variant))
    o = b.observation
    off = {"top": o.images_valid["top"], "wrist": np.zeros_like(o.images_valid["wrist"])}
    blind = replace(o, images_valid=off)
    poison = replace(blind, images={"top": o.images["top"], "wrist": 255 - o.images["wrist"]})
    np.testing.assert_array_equal(answers(p, b, blind), answers(p, b, poison))
    assert np.abs(answers(p, b, blind) - answers(p, b, o)).max() > 1e-6


def test_invalid_camera_for_one_sample_leaves_the_others_alone() -> None:
    p, b = policy(system()), batch(system())
    o = b.observation
    valid = o.images_valid["wrist"].copy()
    valid[1] = False
    mixed = replace(o, images_valid={"top": o.images_valid["top"], "wrist": valid})
    whole, part = p.plan(o, rngs(3)).actions, p.plan(mixed, rngs(3)).actions
    np.testing.assert_allclose(part[[0, 2]], whole[[0, 2]], atol=1e-6)
    assert np.abs(part[1] - whole[1]).max() > 1e-6


def test_frames_before_the_start_change_nothing() -> None:
    p, b = policy(make("window")), batch(make("window"))
    o = b.observation
    early = o.state_valid.copy()
    early[:, 0] = False
    o = replace(o, state_valid=early, images_valid=dict.fromkeys(o.images, early))
    state = o.state.copy()
    state[:, 0] = np.nan
    images = {k: v.copy() for k, v in o.images.items()}
    for v in images.values():
        v[:, 0] = 255 - v[:, 0]
    np.testing.assert_array_equal(
        p.plan(o, rngs(3)).actions, p.plan(replace(o, state=state, images=images), rngs(3)).actions
    )


@pytest.mark.parametrize("variant", ["pi0", "regression", "rotary"])
def test_other_samples_and_text_padding_change_nothing(variant: str) -> None:
    """Sample 0 alone, beside others, and beside a longer instruction that makes its own text padded (M13)."""
    p, b = policy(make(variant)), batch(make(variant))
    o = replace(b.observation, instruction=("push the red disc", "go", "push the red disc go to the blue ring"))
    alone = p.plan(select(o, np.array([0])), rngs(3)[:1]).actions[0]
    together = p.plan(o, rngs(3)).actions[0]
    np.testing.assert_allclose(alone, together, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padded_steps_change_neither_loss_nor_gradient(variant: str) -> None:
    p, b = policy(make(variant)), batch(make(variant))
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


def test_M01_masked_loss_divides_by_what_counts() -> None:
    p, b = policy(system("regression")), batch(system("regression"))
    valid = np.zeros_like(b.chunk.valid)
    valid[:, 0] = True
    loss = p.loss(replace(b, chunk=Chunk(b.chunk.actions, valid)), torch.Generator())
    torch.testing.assert_close(loss.mean(), loss.main.values[:, 0].mean())


def test_future_actions_reach_no_earlier_prediction_through_the_context() -> None:
    """The prefix is encoded without the chunk: its keys and values are the same whatever the actions are."""
    p, b = policy(system()), batch(system())
    first = p.backbone(p.prepare(b.observation))
    p.loss(replace(b, chunk=Chunk(b.chunk.actions + 9, b.chunk.valid)), torch.Generator().manual_seed(0))
    second = p.backbone(p.prepare(b.observation))
    for one, two in zip(first.cache.keys, second.cache.keys, strict=True):
        assert torch.equal(one, two)


def test_preprocessing_is_the_same_object_for_training_and_serving() -> None:
    """A camera frame at its native size and the frame a training cache resized give bit-equal model inputs."""
    p, b = policy(system()), batch(system())
    rng = np.random.default_rng(3)
    native = rng.integers(0, 256, (3, 1, 3, 20, 28), dtype=np.uint8)
    cached = resize_images(native[:, 0], 8, 8)[:, None]
    serve = replace(b.observation, images={"top": native, "wrist": native})
    train = replace(b.observation, images={"top": cached, "wrist": cached})
    one, two = p.prepare(serve), p.prepare(train)
    for camera in ("top", "wrist"):
        assert torch.equal(one.images[camera], two.images[camera])
    assert torch.equal(one.state, two.state)
    assert torch.equal(one.words, two.words)
    np.testing.assert_array_equal(p.plan(serve, rngs(3)).actions, p.plan(train, rngs(3)).actions)


def test_plan_inverts_the_targets() -> None:
    """decode(encode(actions)) gives the physical actions back, relative transform included."""
    made = make("relative")
    p, b = policy(made), batch(made)
    normal = p.targets(b).numpy()
    back = p.transforms.decode(b.observation, p.action_normaliser.decode(normal))
    np.testing.assert_allclose(back, b.chunk.actions, atol=1e-5)


def test_relative_plan_moves_with_the_robot() -> None:
    """The same relative chunk from a shifted state is a shifted absolute chunk when the model ignores the state."""
    made = make("relative")
    p, b = policy(made), batch(made)
    with torch.no_grad():
        p.backbone.state.weight.zero_()
    here = p.plan(b.observation, rngs(3)).actions
    there = p.plan(replace(b.observation, state=b.observation.state + 1), rngs(3)).actions
    np.testing.assert_allclose(there - here, 1.0, atol=1e-5)


def test_samples_use_their_own_generator() -> None:
    p, b = policy(system()), batch(system())
    a = p.plan(b.observation, rngs(3)).actions
    g = rngs(3)
    g[1] = np.random.default_rng(99)
    other = p.plan(b.observation, g).actions
    np.testing.assert_allclose(other[[0, 2]], a[[0, 2]], atol=1e-6)
    assert np.abs(other[1] - a[1]).max() > 1e-4


def test_unknown_words_are_reported_and_add_nothing() -> None:
    p, b = policy(system()), batch(system())
    assert p.unknown_words(["push the green disc, please", "go"]) == ("green", ",", "please")
    assert p.unknown_words(["push the red disc"]) == ()
    o = replace(b.observation, instruction=("push the red disc",) * 3)
    x = replace(b.observation, instruction=("push the purple disc",) * 3)
    assert np.abs(p.plan(o, rngs(3)).actions - p.plan(x, rngs(3)).actions).max() > 1e-6


BAD = {
    "missing camera": (lambda o: replace(o, images={"top": o.images["top"]}), "cameras"),
    "extra camera": (lambda o: replace(o, images=o.images | {"left": o.images["top"]}), "cameras"),
    "state width": (lambda o: replace(o, state=o.state[..., :2]), "S=3"),
    "NaN state": (lambda o: replace(o, state=np.where(o.state == o.state[1, 0, 2], np.nan, o.state)), "grip"),
    "empty instruction": (lambda o: replace(o, instruction=("push", " ", "go")), "sample 1"),
    "one string (D14)": (lambda o: replace(o, instruction="go!"), "tuple of strings"),
    "too few instructions": (lambda o: replace(o, instruction=("go",)), "3 sentences"),
    "float image": (lambda o: replace(o, images={k: v / 255 for k, v in o.images.items()}), "uint8"),
    "other window": (lambda o: replace(o, **_repeat(o)), "T=1"),
    "only punctuation-free blanks": (lambda o: replace(o, instruction=("\t", "a", "b")), "sentence"),
}


def _repeat(o):
    twice = lambda v: np.repeat(v, 2, axis=1)  # noqa: E731
    return {
        "images": {k: twice(v) for k, v in o.images.items()},
        "images_valid": {k: twice(v) for k, v in o.images_valid.items()},
        "state": twice(o.state),
        "state_valid": twice(o.state_valid),
    }


@pytest.mark.parametrize("case", BAD)
def test_bad_observation_is_refused_with_a_sentence(case: str) -> None:
    p, b = policy(system()), batch(system())
    spoil, needle = BAD[case]
    with pytest.raises(InputError, match=r"expected .* got") as caught:
        p.plan(spoil(b.observation), rngs(3))
    assert needle in str(caught.value)


def test_flipped_arrays_are_fine_and_nan_weights_are_not() -> None:
    p, b = policy(system()), batch(system())
    flipped = replace(b.observation, images={k: v[:, :, ::-1] for k, v in b.observation.images.items()})
    copied = replace(b.observation, images={k: v.copy() for k, v in flipped.images.items()})
    np.testing.assert_array_equal(p.plan(flipped, rngs(3)).actions, p.plan(copied, rngs(3)).actions)
    with torch.no_grad():
        p.backbone.state.bias[0] = torch.nan
    with pytest.raises(NonFiniteError, match="finite actions"):
        p.plan(b.observation, rngs(3))


def test_wrong_number_of_generators() -> None:
    p, b = policy(system()), batch(system())
    with pytest.raises(InputError, match="one generator per sample"):
        p.plan(b.observation, rngs(2))


def test_R08_non_finite_values_name_episode_and_frame() -> None:
    p, b = policy(system()), batch(system())
    b = replace(b, episode=np.array([4, 2, 7]), frame=np.array([0, 5, 1]))
    state = b.observation.state.copy()
    state[1, 0, 0] = np.nan
    with pytest.raises(NonFiniteError, match=r"episode 2, frame 5, dimension 0 \(x\)"):
        p.loss(replace(b, observation=replace(b.observation, state=state)), torch.Generator())
    actions = b.chunk.actions.copy()
    actions[2, 3, 1] = np.inf
    with pytest.raises(NonFiniteError, match=r"episode 7, frame 1, step 3, dimension 1 \(dy\)"):
        p.loss(replace(b, chunk=Chunk(actions, b.chunk.valid)), torch.Generator())


def test_constant_dimension_decodes_to_its_constant() -> None:
    from tools import dataset, fitted

    data = dataset(spec=SPEC)
    for part in data.columns["action"]:
        part[:, 1] = 0.04
    for part in data.columns["state"]:
        part[:, 2] = 7.0
    made = system()
    p = made.build(fitted(made, data))
    assert p.action_normaliser.constant == (1,)
    assert p.state_normaliser.constant == (2,)
    plan = p.plan(batch(made).observation, rngs(3)).actions
    np.testing.assert_array_equal(plan[..., 1], np.float32(0.04))
    assert np.isfinite(plan).all()
