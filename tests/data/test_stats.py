"""Statistics are exact and of the selected episodes only; the normaliser is one affine map, the same both ways.

Public reports: N01, N03, N04, N07, N13, N15, R03 (statistics of the training part). N14 and N06 are in
test_data_lerobot_write. N09, N11 and N12 do not apply: which statistics a policy carries is decided by checkpoints.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_tools import memory, spec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import load_file

from vola.data.episodes import Episode, MemoryDataset
from vola.data.stats import FIELDS, KINDS, FeatureStats, Normaliser, Statistics, compute_statistics, describe_rows
from vola.data.transforms import RelativeActions, Transforms
from vola.errors import ConfigError, DataError, InputError

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "normalization"
MAPPED = [k for k in KINDS if k != "identity"]


def dataset(states, actions=None) -> MemoryDataset:
    """Episodes from lists of arrays (L, dim)."""
    actions = states if actions is None else actions
    robot = spec(S=states[0].shape[1], A=actions[0].shape[1], cameras=())
    episodes = tuple(Episode(i, len(s), "push the red disc") for i, s in enumerate(states))
    return MemoryDataset(robot, robot.action.rate, episodes, {"state": states, "action": actions}, {})


def rows(*columns) -> FeatureStats:
    return describe_rows(
        np.stack([np.asarray(c, np.float64) for c in columns], 1), [f"d{i}" for i in range(len(columns))]
    )


# --- against other implementations ---


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "io.safetensors")


@pytest.mark.parametrize(
    ("episodes", "prefix"), [([0, 1, 2], "expected.stats_"), ([1], "intermediate.episode_1_stats_")]
)
def test_golden_statistics(golden, episodes, prefix) -> None:
    data = dataset([golden[f"input.episode_{i}"] for i in range(3)])
    stats = compute_statistics(data, episodes)["action"]
    for field in FIELDS:
        np.testing.assert_allclose(getattr(stats, field), golden[prefix + field], rtol=1e-12, atol=1e-9)


RULES = {
    "lerobot_mean_std": ("mean_std", {"epsilon": 1e-8}, 1e-5),
    "lerobot_min_max": ("min_max", {"epsilon": 1e-8}, 1e-5),
    "lerobot_quantiles": ("quantile", {"epsilon": 1e-8}, 1e-5),
    "lerobot_quantile10": ("quantile10", {"epsilon": 1e-8}, 1e-5),
    "openpi_zscore": ("mean_std", {"epsilon": 1e-6}, 1e-7),
    "openpi_quantile": ("quantile", {"epsilon": 1e-6}, 1e-7),
    "octo_normal": ("mean_std", {"epsilon": 1e-8}, 1e-7),
    "act_zscore": ("mean_std", {"floor": 0.01}, 1e-7),
}


@pytest.mark.parametrize("rule", RULES)
def test_golden_normalisers(golden, rule) -> None:
    """All dimensions but the constant one, for which the published rules give 1e5 and ours 0."""
    kind, options, rtol = RULES[rule]
    data = dataset([golden[f"input.episode_{i}"] for i in range(3)])
    fit = Normaliser.fit(kind, compute_statistics(data, [0, 1, 2])["action"], limit=np.inf, **options)
    assert fit.constant == (2,)
    live = [d for d in range(6) if d != 2]
    encoded = fit.encode(golden["input.probe"])
    assert not encoded[:, 2].any()
    np.testing.assert_allclose(encoded[:, live], golden[f"expected.{rule}"][:, live], rtol=rtol, atol=5e-6)
    if f"expected.{rule}_inverse" in golden:
        decoded = fit.decode(golden["input.normalised_probe"])
        np.testing.assert_allclose(decoded[:, live], golden[f"expected.{rule}_inverse"][:, live], rtol=rtol, atol=5e-6)
        np.testing.assert_array_equal(decoded[:, 2], golden["input.episode_0"][0, 2])


# --- statistics ---


def test_R03_only_the_selected_episodes_count() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((n, 3)).astype(np.float32) for n in (4, 7, 5)]
    before = compute_statistics(dataset(parts), [0, 2])
    held = [parts[0], np.full_like(parts[1], np.nan), parts[2]]
    after = compute_statistics(dataset(held), [0, 2])
    assert before.episodes == after.episodes == (0, 2)
    for key in ("state", "action"):
        assert before[key].to_json() == after[key].to_json()
    np.testing.assert_allclose(before["state"].mean, np.concatenate([parts[0], parts[2]]).mean(0), rtol=1e-6)


@pytest.mark.parametrize("name", ["state", "action"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_named(name, bad) -> None:
    data = memory((3, 7))
    columns = {k: [a.copy() for a in v] for k, v in data.columns.items()}
    columns[name][1][4, 1] = bad
    data = replace(data, columns=columns)
    with pytest.raises(
        DataError, match=rf"{name}: expected finite .* got {bad} in episode 1, frame 4, dimension 1 \(.1\)"
    ):
        compute_statistics(data, [0, 1])


def test_wrong_rows_and_settings_are_refused() -> None:
    with pytest.raises(DataError, match=r"rows of shape \(n >= 1, 2\), got \(3,\)"):
        describe_rows(np.zeros(3), ["a", "b"])
    with pytest.raises(DataError, match=r"got \(0, 2\)"):
        describe_rows(np.zeros((0, 2)), ["a", "b"])
    with pytest.raises(ConfigError, match="chunk length >= 1"):
        compute_statistics(memory(), [0], H=0)
    with pytest.raises(InputError, match="at least one"):
        compute_statistics(memory(), [])
    with pytest.raises(DataError, match="keys.*'state'.*got 'reward'"):
        compute_statistics(memory(), [0])["reward"]


def test_a_robot_without_state_has_empty_statistics() -> None:
    data = dataset([np.zeros((4, 0), np.float32)], [np.ones((4, 2), np.float32)])
    stats = compute_statistics(data, [0])["state"]
    assert stats.mean.shape == (0,)
    assert Normaliser.fit("mean_std", stats).encode(np.zeros((5, 0))).shape == (5, 0)


def test_N07_large_integers_do_not_overflow() -> None:
    values = np.array([[32_000], [-32_000], [31_000], [-31_000]], np.int16)
    stats = describe_rows(values, ["ticks"])
    np.testing.assert_allclose(stats.std, [np.sqrt((32e3**2 + 31e3**2) / 2)])
    pixels = np.random.default_rng(0).integers(0, 256, (5000, 1), dtype=np.uint8)
    np.testing.assert_allclose(describe_rows(pixels, ["red"]).std / 255, 0.289, atol=0.01)


# --- the map ---


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(MAPPED),
    data=arrays(np.float32, (8, 3), elements=st.floats(-1e3, 1e3, width=32)),
    probe=arrays(np.float32, (4, 3), elements=st.floats(-1e4, 1e4, width=32)),
)
def test_decode_undoes_encode_and_training_data_stay_in_reach(kind, data, probe) -> None:
    fit = Normaliser.fit(kind, describe_rows(data, "abc"))
    live = [d for d in range(3) if d not in fit.constant]
    unit = np.maximum(np.abs(fit.shift), np.abs(probe)) + fit.scale
    assert (np.abs(fit.decode(fit.encode(probe)) - probe)[:, live] <= 1e-6 * unit[:, live]).all()
    assert np.abs(fit.encode(data)).max() <= 20 * (1 + 1e-6)
    assert (fit.largest() <= 20 * (1 + 1e-6)).all()
    assert not fit.encode(probe)[:, list(fit.constant)].any()


def test_each_kind_puts_its_range_where_it_says() -> None:
    stats = rows(np.arange(101), np.arange(101) ** 2)
    for kind, ends in (("min_max", ("min", "max")), ("quantile", ("q01", "q99")), ("quantile10", ("q10", "q90"))):
        fit = Normaliser.fit(kind, stats)
        got = fit.encode(np.stack([getattr(stats, e) for e in ends]))
        np.testing.assert_allclose(got, [[-1, -1], [1, 1]], atol=1e-6)
    z = Normaliser.fit("mean_std", stats).encode(np.stack([np.arange(101), np.arange(101) ** 2], 1))
    np.testing.assert_allclose((z.mean(0), z.std(0)), ([0, 0], [1, 1]), atol=1e-6)
    np.testing.assert_array_equal(Normaliser.fit("identity", stats).encode(np.array([3.0, 4.0])), [3, 4])
    mixed = Normaliser.fit(["identity", "min_max"], stats)
    np.testing.assert_allclose(mixed.encode(np.array([7.0, 1e4])), [7, 1])


@pytest.mark.parametrize("kind", MAPPED)
def test_N01_constant_dimensions(kind) -> None:
    rng = np.random.default_rng(0)
    actions = np.concatenate([rng.standard_normal((50, 6)), np.full((50, 1), 0.04)], 1).astype(np.float32)
    fit = Normaliser.fit(kind, compute_statistics(dataset([actions]), [0])["action"])
    assert fit.constant == (6,)
    z = fit.encode(actions)
    assert np.isfinite(z).all()
    np.testing.assert_array_equal(z[:, 6], 0)
    np.testing.assert_array_equal(fit.decode(z)[:, 6], np.float32(0.04))
    np.testing.assert_array_equal(fit.decode(rng.standard_normal((9, 7)))[:, 6], np.float32(0.04))
    later = actions[:1].copy()
    later[0, 6] = 0.0400001
    assert abs(fit.encode(later)[0, 6]) <= 1
    outside, count = fit.count_outside(np.full((3, 7), 0.5, np.float32))
    assert (outside[6], count) == (3, 3)


def test_rounding_of_one_value_is_still_constant() -> None:
    third = np.float32(1000 / 3) + np.float32([0, 3e-5, -3e-5, 0])
    assert Normaliser.fit("mean_std", rows(third)).constant == (0,)
    assert Normaliser.fit("mean_std", rows([0, 1e-5, 0, 1e-5])).constant == ()


@pytest.mark.parametrize("kind", MAPPED)
def test_N03_scaling_depends_on_stored_statistics_only(kind) -> None:
    """A chunk is coded alike alone or beside others, and decoded by a normaliser read back from JSON."""
    rng = np.random.default_rng(0)
    chunks = np.stack([rng.uniform(0, 1, (8, 1)), rng.uniform(0, 100, (8, 1)), np.full((8, 1), 7.0)])
    fit = Normaliser.fit(kind, describe_rows(chunks.reshape(-1, 1), ["x"]))
    loaded = Normaliser.from_json(json.loads(json.dumps(fit.to_json())))
    for chunk in chunks:
        np.testing.assert_allclose(loaded.decode(fit.encode(chunk)), chunk, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(fit.encode(chunks)[1], fit.encode(chunks[1]))


def offsets() -> MemoryDataset:
    """Joint targets spread over 1.5 +- 0.3 that lie 0.01 from the current state."""
    rng = np.random.default_rng(0)
    states = [1.5 + 0.3 * rng.standard_normal((9, 2)) for _ in range(40)]
    actions = [s + 0.01 * rng.standard_normal(s.shape) for s in states]
    return dataset([s.astype(np.float32) for s in states], [a.astype(np.float32) for a in actions])


def test_N04_statistics_belong_to_their_action_representation() -> None:
    data, relative = offsets(), Transforms((RelativeActions(((0, 0), (1, 1))),))
    absolute = compute_statistics(data, range(40))["action"]
    moved = compute_statistics(data, range(40), H=1, transforms=relative)["action"]
    np.testing.assert_allclose(absolute.std, 0.3, rtol=0.1)
    np.testing.assert_allclose(moved.std, 0.01, rtol=0.1)
    z = Normaliser.fit("mean_std", moved).encode(
        np.concatenate(data.columns["action"]) - np.concatenate(data.columns["state"])
    )
    np.testing.assert_allclose((z.mean(0), z.std(0)), ([0, 0], [1, 1]), atol=1e-3)
    Normaliser.fit("mean_std", moved).require(relative)
    with pytest.raises(ConfigError, match="representation.*got 'absolute'.*compute_statistics"):
        Normaliser.fit("mean_std", absolute).require(relative)
    with pytest.raises(ConfigError, match="expected statistics of the action representation 'absolute'"):
        Normaliser.fit("mean_std", moved).require(Transforms())


def test_relative_statistics_pool_every_valid_entry_of_every_chunk() -> None:
    data = memory((3, 5))
    H, relative = 4, Transforms((RelativeActions(((0, 1),)),))
    pool = []
    for episode in data.episodes:
        s, a = data.column("state", episode.index), data.column("action", episode.index)
        for t in range(episode.length):
            for h in range(H):
                if t + h < episode.length:
                    pool.append([a[t + h, 0] - s[t, 1], a[t + h, 1]])
    wanted = describe_rows(np.array(pool), data.spec.action.names)
    got = compute_statistics(data, [0, 1], H, relative)["action"]
    assert got.count == len(pool)
    for field in FIELDS:
        np.testing.assert_allclose(getattr(got, field), getattr(wanted, field), rtol=1e-6)


def test_N13_a_rare_outlier_cannot_blow_up() -> None:
    rng = np.random.default_rng(0)
    quiet = 1e-7 * rng.standard_normal(1000)
    quiet[500] = 0.1
    degrees = rng.uniform(-180, 180, 1000)
    stats = rows(quiet, degrees)
    for kind in MAPPED:
        fit = Normaliser.fit(kind, stats)
        assert (fit.largest() <= 20 + 1e-3).all()
        assert fit.constant == ()
        np.testing.assert_allclose(fit.decode(fit.encode(np.array([0.1, -170.0]))), [0.1, -170], rtol=1e-4)
    assert Normaliser.fit("mean_std", stats).guarded == (0,)
    assert Normaliser.fit("mean_std", stats, limit=np.inf).largest()[0] > 30
    assert Normaliser.fit("min_max", stats).guarded == ()


def test_a_gripper_that_rarely_moves_keeps_its_signal() -> None:
    """Closed in 5 of 1000 frames: q01 = q99, so quantiles alone would divide by zero."""
    stats = rows(np.arange(1000) < 5)
    fit = Normaliser.fit("quantile", stats)
    assert (fit.constant, fit.guarded) == ((), (0,))
    np.testing.assert_allclose(fit.decode(fit.encode(np.array([[0.0], [1.0]]))), [[0], [1]], atol=1e-6)
    assert fit.encode(np.array([1.0])) > 1
    with pytest.raises(ConfigError, match="quantile cannot scale d0.*Use min_max"):
        Normaliser.fit("quantile", stats, limit=np.inf)


def test_values_outside_the_training_range_are_counted() -> None:
    fit = Normaliser.fit("mean_std", rows(np.linspace(0, 1, 11), np.linspace(0, 100, 11)))
    values = np.array([[[0.5, 50], [1.1, 50]], [[-0.1, 101], [np.nan, 0]]])
    outside, count = fit.count_outside(values)
    assert (outside.tolist(), count) == ([3, 1], 4)
    outside, count = fit.count_outside(values, valid=np.array([[True, True], [False, False]]))
    assert (outside.tolist(), count) == ([1, 0], 2)


def test_N15_a_missing_statistic_names_the_set() -> None:
    saved = compute_statistics(memory(), [0, 1]).to_json()
    saved["dataset"] = "second_set"
    for field in ("q01", "q99"):
        del saved["features"]["action"][field]
    with pytest.raises(DataError, match=r"statistics of second_set, action: .*\['q01', 'q99'\].*compute them again"):
        Statistics.from_json(saved)


def test_statistics_and_normalisers_survive_json_exactly() -> None:
    rng = np.random.default_rng(0)
    stats = compute_statistics(dataset([rng.standard_normal((9, 2)).astype(np.float32) / 3]), [0])
    again = Statistics.from_json(json.loads(json.dumps(stats.to_json())))
    assert again.to_json() == stats.to_json()
    fit = Normaliser.fit("mean_std", stats["action"])
    loaded = Normaliser.from_json(json.loads(json.dumps(fit.to_json())))
    probe = rng.standard_normal((5, 2))
    np.testing.assert_array_equal(loaded.encode(probe), fit.encode(probe))
    with pytest.raises(ConfigError, match=r"got none for \['scale'\]"):
        Normaliser.from_json({k: v for k, v in fit.to_json().items() if k != "scale"})


@pytest.mark.parametrize(
    ("settings_", "match"),
    [
        ({"kind": "zscore"}, "'zscore'"),
        ({"kind": ["mean_std"]}, r"one per dimension \(2\)"),
        ({"kind": "mean_std", "epsilon": -1.0}, "epsilon >= 0"),
        ({"kind": "mean_std", "limit": 0.0}, "limit > 0"),
    ],
)
def test_wrong_settings_are_refused(settings_, match) -> None:
    with pytest.raises(ConfigError, match=match):
        Normaliser.fit(stats=rows([0, 1], [0, 2]), **settings_)


def test_wrong_shapes_are_refused() -> None:
    fit = Normaliser.fit("mean_std", rows([0, 1], [0, 2]))
    with pytest.raises(InputError, match=r"\(\.\.\., 2\) for \('d0', 'd1'\), got \(4, 3\)"):
        fit.encode(np.zeros((4, 3)))
    with pytest.raises(InputError, match=r"got \(\)"):
        fit.decode(np.float64(1))
    with pytest.raises(ConfigError, match="shift of shape"):
        replace(fit, shift=np.zeros(3))
    with pytest.raises(ConfigError, match="scale >= 0"):
        replace(fit, scale=np.array([1.0, -1.0]))
    with pytest.raises(DataError, match="mean of shape"):
        replace(rows([0, 1]), mean=np.zeros(2))
