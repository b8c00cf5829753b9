"""Transforms have exact inverses, in reverse order; images are resized in integers. N04 continues in test_stats."""

import numpy as np
import pytest
from data_tools import spec
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vola.data.transforms import RelativeActions, Transforms, resize_images
from vola.errors import ConfigError, InputError
from vola.types import ActionSpec, Observation, RobotSpec, StateSpec


def observation(state: np.ndarray) -> Observation:
    return Observation({}, {}, state.astype(np.float32), np.ones(state.shape[:2], bool), ("x",) * len(state))


def random(B=3, T=2, S=4, H=5, A=3, seed=0):
    rng = np.random.default_rng(seed)
    return observation(rng.standard_normal((B, T, S))), rng.standard_normal((B, H, A)).astype(np.float32)


# --- relative actions ---


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), T=st.integers(1, 3), H=st.integers(1, 4))
def test_relative_actions_are_offsets_from_the_last_state_and_come_back(seed, T, H) -> None:
    seen, actions = random(T=T, H=H, seed=seed)
    step = RelativeActions(((2, 0), (0, 3)))
    encoded = step.encode(seen, actions)
    for b in range(3):
        for h in range(H):
            now = seen.state[b, -1]
            wanted = actions[b, h] - [now[3], 0, now[0]]
            np.testing.assert_allclose(encoded[b, h], wanted, atol=1e-6)
    np.testing.assert_allclose(step.decode(seen, encoded), actions, atol=1e-6)


def test_the_past_of_the_window_and_the_input_array_are_not_touched() -> None:
    seen, actions = random()
    before = actions.copy()
    step = RelativeActions(((0, 0),))
    encoded = step.encode(seen, actions)
    np.testing.assert_array_equal(actions, before)
    other = seen.state.copy()
    other[:, :-1] += 100
    np.testing.assert_array_equal(step.encode(observation(other), actions), encoded)


def test_several_steps_are_undone_in_reverse_order() -> None:
    """The second step shifts what the first has shifted, by another dimension of the state."""
    seen, actions = random()
    steps = Transforms((RelativeActions(((0, 0), (1, 1))), RelativeActions(((1, 2),))))
    encoded = steps.encode(seen, actions)
    now = seen.state[:, -1:]
    np.testing.assert_allclose(encoded[..., 1], actions[..., 1] - now[..., 1] - now[..., 2], atol=1e-6)
    np.testing.assert_allclose(steps.decode(seen, encoded), actions, atol=1e-6)
    nothing = Transforms()
    np.testing.assert_array_equal(nothing.encode(seen, actions), actions)


def test_fingerprints_tell_representations_apart() -> None:
    one, two = Transforms((RelativeActions(((0, 0),)),)), Transforms((RelativeActions(((0, 1),)),))
    assert len({Transforms().fingerprint(), one.fingerprint(), two.fingerprint()}) == 3
    assert Transforms().fingerprint() == "absolute"
    assert Transforms.from_json(one.to_json()) == one
    assert Transforms.from_json([]) == Transforms()
    with pytest.raises(ConfigError, match="'rotate'"):
        Transforms.from_json([{"kind": "rotate"}])


def test_pairs_by_name_leave_grippers_out() -> None:
    robot = RobotSpec(
        (),
        StateSpec(("x", "y", "grip", "force"), ("m", "m", "m", "N")),
        ActionSpec(("grip", "y", "x"), ("m", "m", "m"), ("gripper", "position", "position"), 10.0),
    )
    assert RelativeActions.by_name(robot).pairs == ((1, 1), (2, 0))
    assert RelativeActions.by_name(robot, ["grip"]).pairs == ((0, 2),)
    with pytest.raises(ConfigError, match=r"\['force'\]"):
        RelativeActions.by_name(robot, ["x", "force"])
    with pytest.raises(ConfigError, match="no common name"):
        RelativeActions.by_name(spec())


@pytest.mark.parametrize("pairs", [(), ((0, 0), (0, 1)), ((-1, 0),)])
def test_wrong_pairs_are_refused(pairs) -> None:
    with pytest.raises(ConfigError, match="each action dimension once"):
        RelativeActions(pairs)


def test_actions_that_do_not_fit_are_refused() -> None:
    seen, actions = random()
    with pytest.raises(InputError, match=r"\(\(3, 0\),\) do not fit A=3, S=4"):
        RelativeActions(((3, 0),)).encode(seen, actions)
    with pytest.raises(InputError, match=r"\(B H A\) with B=3"):
        RelativeActions(((0, 0),)).encode(seen, actions[0])


# --- images ---


def noise(N=2, C=3, Y=12, X=16, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (N, C, Y, X), dtype=np.uint8)


def test_the_target_size_needs_no_work_and_a_flat_image_stays_flat() -> None:
    images = noise()
    assert resize_images(images, 12, 16) is images
    flat = np.full((1, 3, 30, 40), 137, np.uint8)
    np.testing.assert_array_equal(resize_images(flat, 7, 9), 137)


def test_shrinking_averages_and_keeps_places_and_channels() -> None:
    """Antialiased: a board of single pixels becomes grey, not black or white; corners and channels stay apart."""
    board = (np.indices((32, 32)).sum(0) % 2 * 255).astype(np.uint8)
    small = resize_images(np.stack([board] * 3)[None], 8, 8)
    assert np.abs(small.astype(int) - 127).max() <= 4
    corner = np.zeros((1, 3, 32, 32), np.uint8)
    corner[0, 1, :16, 16:] = 200
    out = resize_images(corner, 4, 4)
    np.testing.assert_array_equal(out[0, 1, :2, 2:].min() > 150, True)
    assert out[0, [0, 2]].max() == 0
    assert out[0, 1, 2:].max() < 60


def test_one_channel_and_three_are_filtered_alike() -> None:
    images = noise()
    grey = resize_images(images[:, :1], 5, 7)
    np.testing.assert_array_equal(grey, resize_images(images, 5, 7)[:, :1])
    wanted = Image.fromarray(images[0, 0]).resize((7, 5), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(grey[0, 0], np.asarray(wanted))


@pytest.mark.parametrize(("size", "inner"), [((8, 8), (6, 8)), ((6, 24), (6, 8)), ((24, 32), (24, 32))])
def test_padding_keeps_the_aspect_ratio(size, inner) -> None:
    """12x16 white: the picture fills ``inner``, centred, the rest is black."""
    out = resize_images(np.full((1, 3, 12, 16), 255, np.uint8), *size, fit="pad")
    assert out.shape == (1, 3, *size)
    top, left = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    wanted = np.zeros(size, np.uint8)
    wanted[top : top + inner[0], left : left + inner[1]] = 255
    np.testing.assert_array_equal(out[0, 0], wanted)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"images": noise()[0]}, "N C Y X"),
        ({"images": noise().astype(np.float32)}, "uint8, got float32"),
        ({"height": 0}, "at least 1x1, got 0x8"),
        ({"fit": "crop"}, "'crop'"),
    ],
)
def test_wrong_images_are_refused(change, match) -> None:
    with pytest.raises(InputError, match=match):
        resize_images(**{"images": noise(), "height": 8, "width": 8, **change})


class Scale:
    """A step that does not commute with RelativeActions."""

    def encode(self, observation, actions):
        return 2 * actions

    def decode(self, observation, actions):
        return actions / 2


def test_steps_are_undone_in_reverse_order() -> None:
    state = np.array([[[1.0, 5.0]]], np.float32)
    observation = Observation({}, {}, state, np.ones((1, 1), bool), ("a b",))
    actions = np.array([[[3.0], [4.0]]], np.float32)
    both = Transforms((Scale(), RelativeActions(((0, 0),))))
    encoded = both.encode(observation, actions)
    np.testing.assert_array_equal(encoded[0, :, 0], [5, 7])
    np.testing.assert_array_equal(both.decode(observation, encoded), actions)
