"""Tabletop under Gymnasium's own checks, and the vector environment against single ones."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from vola.envs import gym_ids
from vola.envs.gym_env import TabletopEnv, TabletopVectorEnv
from vola.envs.tabletop import TASKS
from vola.errors import ConfigError, InputError

SETTINGS = {"noise": 0.2, "time_limit": 5, "image_size": 16}


@pytest.fixture(autouse=True)
def _registered():
    gym_ids.register()


def same(a, b):
    """Equal, with dtypes, through dicts and tuples."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    else:
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("env_id", TASKS)
@pytest.mark.parametrize("render_mode", [None, "rgb_array"])
def test_gymnasium_checker_is_satisfied(env_id, render_mode):
    env = gymnasium.make(env_id, render_mode=render_mode)
    check_env(env.unwrapped)
    env.close()


def test_registering_twice_changes_nothing():
    before = {i: gymnasium.registry[i] for i in gym_ids.IDS}
    gym_ids.register()
    assert all(gymnasium.registry[i] is spec for i, spec in before.items())
    assert set(gym_ids.IDS) == set(TASKS)


@pytest.mark.parametrize("env_id", TASKS)
def test_vector_environment_plays_the_same_episodes_as_single_ones(env_id):
    """Bit-equal to Gymnasium's own SyncVectorEnv over several episodes, autoreset included."""
    ours = gymnasium.make_vec(env_id, num_envs=3, **SETTINGS)
    theirs = gymnasium.make_vec(env_id, num_envs=3, vectorization_mode="sync", **SETTINGS)
    assert isinstance(ours, TabletopVectorEnv)
    assert ours.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    for a, b in zip(ours.reset(seed=11), theirs.reset(seed=11), strict=True):
        same(a, b)
    ours.action_space.seed(0)
    episodes = set()
    for _ in range(14):
        actions = ours.action_space.sample()
        for a, b in zip(ours.step(actions), theirs.step(actions), strict=True):
            same(a, b)
        episodes |= set(ours.table.seeds.tolist())
    assert len(episodes) == 9
    for seed in ([1, None, 3], None):
        observation, info = ours.reset(seed=seed)
        assert observation in ours.observation_space
    ours.close()
    theirs.close()


def test_reward_is_paid_once_in_the_step_that_succeeds():
    env = TabletopVectorEnv("vola/Compose-v0", num_envs=4)
    env.reset(seed=0)
    paid = np.zeros(4)
    for t in range(25):
        ended = env.table.done
        _, reward, terminated, truncated, info = env.step(env.table.world.goal - env.table.world.robot)
        paid += reward
        assert (terminated == (t == 23)).all()
        assert not truncated.any()
        assert (reward == (1.0 if t == 23 else 0.0)).all()
        assert (info["success"] == (t == 23)).all()
    assert ended.all()
    assert (paid == 1).all()
    assert (env.table.steps == 0).all()


def test_single_environment_ends_with_the_reason():
    env = TabletopEnv("vola/Detour-v0")
    _, info = env.reset(seed=5)
    first, done = info["start_hash"], False
    while not done:
        observation, reward, terminated, truncated, info = env.step(np.array([0.0, 0.12], np.float32))
        done = terminated or truncated
        assert observation in env.observation_space
        assert reward == 0
    assert info == {"seed": 5, "start_hash": first, "success": False, "failure": "collision"}
    assert env.reset()[1]["start_hash"] != first
    assert env.reset(seed=5)[1]["start_hash"] == first


def test_pictures_for_people():
    env = gymnasium.make("vola/Push-v0", render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().shape == (256, 256, 3)
    vector = TabletopVectorEnv("vola/Push-v0", num_envs=2, render_mode="rgb_array")
    vector.reset(seed=0)
    frames = vector.render()
    assert isinstance(frames, tuple)
    np.testing.assert_array_equal(frames[0], env.render())


def test_misuse_is_refused():
    with pytest.raises(InputError, match="render_mode"):
        TabletopEnv(render_mode="human")
    with pytest.raises(ConfigError, match="Did you mean"):
        gymnasium.make("vola/Detour-v0", nois=0.1)
    with pytest.raises(InputError, match="num_envs"):
        TabletopVectorEnv(num_envs=0)
    env, vector = TabletopEnv(), TabletopVectorEnv(num_envs=2)
    env.reset(seed=0)
    with pytest.raises(InputError, match="rgb_array"):
        env.render()
    with pytest.raises(InputError, match="options"):
        env.reset(options={"wall": 1})
    with pytest.raises(InputError, match="2 seeds"):
        vector.reset(seed=[1, 2, 3])
    with pytest.raises(InputError, match="finite"):
        env.step(np.array([np.nan, 0.0]))
    with pytest.raises(InputError, match="actions"):
        env.step(np.zeros(3))
