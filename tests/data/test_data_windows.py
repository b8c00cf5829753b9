"""Windows never leave their episode; the order of training is a pure function; only frames asked for are decoded."""

import numpy as np
import pytest
from data_tools import TEXTS, memory, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.progress import Progress

from vola.data.episodes import Episode, MemoryDataset, split_episodes
from vola.data.mixture import CYCLE, Mixture
from vola.data.windows import Windows, batch_indices
from vola.errors import ConfigError, DataError, InputError


def everything(w: Windows):
    return w.batch(np.arange(len(w)))


@settings(max_examples=40, deadline=None)
@given(
    order=st.permutations(range(5)).flatmap(lambda p: st.integers(1, 5).map(lambda n: p[:n])),
    T=st.integers(1, 4),
    H=st.integers(1, 6),
    stride=st.integers(1, 3),
    cache=st.sampled_from([0, 8 * 8 * 3 * 5, 1 << 20]),
)
def test_D03_windows_stay_inside_their_episode(order, T, H, stride, cache) -> None:
    """Any subset in any order, whatever fits the cache: values and pixels are the episode's own, consecutive in t."""
    data = memory()
    w = Windows(data, order, T, H, cache_bytes=cache, stride=stride)
    b = w.batch(np.random.default_rng(0).permutation(len(w)))
    length = np.array([e.length for e in data.episodes])[b.episode]
    ahead = b.frame[:, None] + np.arange(H)
    np.testing.assert_array_equal(b.chunk.valid, ahead < length[:, None])
    held = 1000 * b.episode[:, None] + np.minimum(ahead, length[:, None] - 1)
    np.testing.assert_array_equal(b.chunk.actions[..., 0], held)
    back = b.frame[:, None] + np.arange(-T + 1, 1)
    np.testing.assert_array_equal(b.observation.state_valid, back >= 0)
    np.testing.assert_array_equal(b.observation.state[..., 1], 1000 * b.episode[:, None] + np.maximum(back, 0))
    pixel = (16 * b.episode[:, None] + np.maximum(back, 0)) % 256
    images = b.observation.images["top"]
    np.testing.assert_array_equal(images, np.broadcast_to(pixel[..., None, None, None], images.shape))
    np.testing.assert_array_equal(b.observation.images_valid["top"], back >= 0)
    assert b.observation.instruction == tuple(TEXTS[e % 2] for e in b.episode)
    assert len(w) == sum(-(-data.episodes[e].length // stride) for e in order)
    assert set(zip(b.episode, b.frame, strict=True)) == {
        (e, t) for e in order for t in range(0, length_of(data, e), stride)
    }
    b.observation.check(w.spec)
    b.chunk.check(w.spec.action, H)


def length_of(data: MemoryDataset, episode: int) -> int:
    return data.episodes[episode].length


def test_D03_episode_numbers_are_names_not_places() -> None:
    """A dataset that holds episodes 10, 20, 99 only."""
    data = memory((4, 3, 5), ids=(10, 20, 99))
    b = everything(Windows(data, [99, 10], H=2))
    np.testing.assert_array_equal(b.episode, [99] * 5 + [10] * 4)
    np.testing.assert_array_equal(b.chunk.actions[:, 0, 0] // 1000, b.episode)
    with pytest.raises(DataError, match=r"episode 0.*\[10, 20, 99\]"):
        Windows(data, [0])


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 30), size=st.integers(1, 40), seed=st.integers(0, 5))
def test_batch_indices_cover_every_epoch_once(n, size, seed) -> None:
    steps = -(-3 * n // size)
    stream = np.concatenate([batch_indices(n, size, seed, s) for s in range(steps)])[: 3 * n]
    for epoch in range(3):
        np.testing.assert_array_equal(np.sort(stream[epoch * n : (epoch + 1) * n]), np.arange(n))
    np.testing.assert_array_equal(stream[:size], batch_indices(n, size, seed, 0)[: 3 * n])


def test_batch_indices_do_not_depend_on_the_batch_size_and_differ_by_epoch_and_seed() -> None:
    one = np.concatenate([batch_indices(20, 4, 7, s) for s in range(10)])
    np.testing.assert_array_equal(one, np.concatenate([batch_indices(20, 8, 7, s) for s in range(5)]))
    assert not np.array_equal(one[:20], one[20:])
    assert not np.array_equal(one[:20], batch_indices(20, 20, 8, 0))
    with pytest.raises(ConfigError, match="step >= 0"):
        batch_indices(20, 4, 7, -1)


def test_D10_without_shuffling_the_order_is_stored_order() -> None:
    data = memory((60, 4, 5))
    w = Windows(data, [0])
    frames = np.concatenate([w.batch(batch_indices(len(w), 20, 0, s, shuffle=False)).frame for s in range(3)])
    np.testing.assert_array_equal(frames, np.arange(60))
    assert set(everything(Windows(data, [1])).episode) == {1}


def test_D21_axes_are_always_there_and_seconds_are_refused() -> None:
    b = everything(Windows(memory(), [0, 1], T=1, H=1))
    assert b.observation.state.shape == (10, 1, 3)
    assert b.chunk.actions.shape == (10, 1, 2)
    assert b.observation.images["top"].shape == (10, 1, 3, 8, 8)
    for bad in (0, 1.0, True):
        with pytest.raises(ConfigError, match="whole number of frames"):
            Windows(memory(), [0], H=bad)
    with pytest.raises(ConfigError, match="0.33 frames at 10 fps; the nearest is 1"):
        Windows(memory(), [0], H=0.033)


def test_D13_one_dimension_keeps_its_axis() -> None:
    data = memory((6,), spec(S=1, A=1, cameras=()))
    b = everything(Windows(data, [0], T=2, H=3))
    assert b.observation.state.shape == (6, 2, 1)
    assert b.chunk.actions.shape == (6, 3, 1)


class Counting(MemoryDataset):
    """Remembers which frames were decoded."""

    def frames(self, camera, episode_index, frames):
        self.__dict__.setdefault("log", []).extend((episode_index, f) for f in frames)
        return super().frames(camera, episode_index, frames)


def counting(lengths=(3, 7, 4, 9, 5)) -> Counting:
    data = memory(lengths)
    return Counting(data.spec, data.fps, data.episodes, data.columns, data.images)


def test_only_frames_of_the_observation_are_decoded_once() -> None:
    data = counting()
    w = Windows(data, [1, 3], T=2, H=16, stride=4)
    everything(w)
    everything(w)
    # starts 0, 4 of episode 1 and 0, 4, 8 of episode 3, each with the frame before
    assert sorted(data.log) == [(1, 0), (1, 3), (1, 4), (3, 0), (3, 3), (3, 4), (3, 7), (3, 8)]


def test_prefetch_reads_in_file_order_and_stops_at_the_bound() -> None:
    data = counting()
    w = Windows(data, [3, 1], resize=(4, 4), cache_bytes=3 * 4 * 4 * 10)
    with Progress(disable=True) as progress:
        assert w.prefetch(progress) == 10
    assert data.log == [(1, t) for t in range(7)] + [(3, t) for t in range(3)]
    assert w.cached == (10, 16)
    b = everything(w)
    np.testing.assert_array_equal(b.observation.images["top"][:, 0, 0, 0, 0], 16 * b.episode + b.frame)
    assert w.cached == (10, 16)


def test_starts_choose_samples_but_not_chunks() -> None:
    data = memory((5, 4))
    masks = {0: np.array([True, False, False, True, False]), 1: np.ones(4, bool)}
    b = everything(Windows(data, [0, 1], H=3, starts=masks))
    assert b.frame[b.episode == 0].tolist() == [0, 3]
    assert b.chunk.actions[0, :, 0].tolist() == [0, 1, 2]
    with pytest.raises(InputError, match="episode 1 has no frame left"):
        Windows(data, [0, 1], starts={**masks, 1: np.zeros(4, bool)})
    with pytest.raises(InputError, match=r"bool array \(4,\) for episode 1"):
        Windows(data, [0, 1], starts={0: masks[0]})


@pytest.mark.parametrize(
    ("indices", "match"),
    [([99], r"0\.\.9, got 99"), ([-1], "-1"), ([0.5], "whole numbers"), ([], "whole numbers"), (3, "whole numbers")],
)
def test_wrong_sample_numbers_are_refused(indices, match) -> None:
    with pytest.raises(InputError, match=match):
        Windows(memory(), [0, 1]).batch(indices)


def test_wrong_selections_are_refused() -> None:
    with pytest.raises(InputError, match="at least one"):
        Windows(memory(), [])
    with pytest.raises(InputError, match="got 1 more than once"):
        Windows(memory(), [1, 0, 1])


# --- splits ---


def twenty(second: int = 10) -> MemoryDataset:
    data = memory((2,) * 20, spec(cameras=()))
    episodes = tuple(Episode(e.index, 2, TEXTS[e.index >= 20 - second]) for e in data.episodes)
    return MemoryDataset(data.spec, data.fps, episodes, data.columns, {})


@pytest.mark.parametrize("second", [10, 5, 2])
def test_R03_split_is_by_episode_stratified_and_seeded(second) -> None:
    data = twenty(second)
    train, val = split_episodes(data, 0.1, seed=3)
    assert sorted(train + val) == list(range(20))
    assert len(val) == 2
    texts = {e.index: e.instruction for e in data.episodes}
    assert {texts[e] for e in val} == set(TEXTS)
    assert {texts[e] for e in train} == set(TEXTS)
    assert split_episodes(data, 0.1, seed=3) == (train, val)
    assert len({split_episodes(data, 0.1, seed=s)[1] for s in range(20)}) > 5


def test_split_of_few_episodes() -> None:
    two = memory((2, 2))
    train, val = split_episodes(two, 0.01, seed=0)
    assert len(train) == len(val) == 1
    assert split_episodes(two, 0.0, seed=0) == ((0, 1), ())
    assert len(split_episodes(two, 0.99, seed=0)[0]) == 1
    with pytest.raises(ConfigError, match="at least 2 episodes"):
        split_episodes(memory((5,)), 0.1, seed=0)
    with pytest.raises(ConfigError, match=r"\[0, 1\)"):
        split_episodes(two, 1.0, seed=0)


# --- mixtures ---


def parts(sizes=(10, 100, 1000)) -> list[Windows]:
    return [Windows(memory((n,), spec(cameras=())), [0]) for n in sizes]


def test_R05_shares_of_the_stream_are_the_weights() -> None:
    mix = Mixture(parts(), (1, 1, 2))
    drawn = [mix.draw(64, 0, s) for s in range(160)]
    part = np.concatenate([p for p, _ in drawn])[:10_000]
    index = np.concatenate([i for _, i in drawn])[:10_000]
    share = np.bincount(part, minlength=3) / len(part)
    np.testing.assert_allclose(share, [0.25, 0.25, 0.5], atol=1e-9)
    np.testing.assert_allclose(mix.realised, mix.intended)
    np.testing.assert_allclose(mix.epochs, [27.75, 2.775, 0.555])
    for k, n in enumerate((10, 100, 1000)):
        own = index[part == k]
        np.testing.assert_array_equal(np.sort(own[:n]), np.arange(n))
    # the stream does not depend on how it is cut
    again = np.concatenate([mix.draw(100, 0, s)[1] for s in range(100)])
    np.testing.assert_array_equal(again, index)


def test_R05_weight_zero_tiny_and_wrong() -> None:
    part, _ = Mixture(parts(), (0, 1e-6, 1)).draw(CYCLE, 0, 0)
    assert np.bincount(part, minlength=3).tolist() == [0, 1, 999]
    for bad in ((0, 0, 0), (1, -1, 1), (1, 1), (1, np.nan, 1)):
        with pytest.raises(ConfigError):
            Mixture(parts(), bad)
    other = Windows(memory((5,), spec(S=2, cameras=())), [0])
    with pytest.raises(ConfigError, match="part 1"):
        Mixture([parts((5,))[0], other], (1, 1))


def test_a_mixed_batch_keeps_the_order_drawn() -> None:
    first, second = Windows(memory((6,)), [0]), Windows(memory((6, 6)), [1])
    mix = Mixture([first, second], (1, 1))
    part, index = mix.draw(16, 0, 0)
    b = mix.batch(part, index)
    np.testing.assert_array_equal(b.episode, part)
    np.testing.assert_array_equal(b.frame, index)
    np.testing.assert_array_equal(b.observation.images["top"][:, 0, 0, 0, 0], 16 * part + index)
    np.testing.assert_array_equal(b.chunk.actions[:, 0, 0], 1000 * part + index)
    assert b.observation.instruction == tuple(TEXTS[p] for p in part)


# --- memory datasets ---


def test_memory_datasets_check_what_they_are_given() -> None:
    good = memory((3, 4))
    with pytest.raises(DataError, match=r"action: episode 1 has 4 frames.*\(4, 2\), got \(4,\)"):
        MemoryDataset(
            good.spec, 10, good.episodes, {**good.columns, "action": [np.zeros((3, 2)), np.zeros(4)]}, good.images
        )
    with pytest.raises(DataError, match="cameras"):
        MemoryDataset(good.spec, 10, good.episodes, good.columns, {})
    with pytest.raises(DataError, match=r"frames in 0\.\.2, got 3"):
        good.frames("top", 0, [3])
    with pytest.raises(DataError, match="'wrist'"):
        good.frames("wrist", 0, [0])
    with pytest.raises(DataError, match="'reward'"):
        good.column("reward", 0)


def test_fingerprints_follow_the_content() -> None:
    base = memory((3, 4))
    assert memory((3, 4)).fingerprint() == base.fingerprint()
    action = [a.copy() for a in base.columns["action"]]
    action[1][0, 0] += 1e-3
    changed = MemoryDataset(base.spec, 10.0, base.episodes, {**base.columns, "action": action}, base.images)
    assert changed.fingerprint() != base.fingerprint()
