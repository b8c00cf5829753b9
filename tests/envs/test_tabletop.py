"""The Tabletop core: scenes from seeds, physics, judgement, noise, and every way of misusing it."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vola.envs.experts import Expert
from vola.envs.scene import COLOURS, PALETTE, distance
from vola.envs.tabletop import TASKS, make_tabletop
from vola.envs.tasks import PLACES, SHAPES, combinations
from vola.errors import ConfigError, InputError

DISTURBED = {"noise": 0.3, "kick_probability": 0.2}


def play(table, steps=200):
    """Run the expert; returns all states and the pictures of every third step."""
    expert, states, pictures = Expert(table), [table.state], [table.render()]
    for t in range(steps):
        if table.done.all():
            break
        states.append(table.step(expert.act()).state)
        if t % 3 == 0:
            pictures.append(table.render())
    return np.stack(states), np.stack(pictures)


@pytest.mark.parametrize("env_id", TASKS)
def test_a_scene_depends_on_its_seed_alone(env_id):
    table = make_tabletop(env_id, **DISTURBED)
    table.reset(np.arange(7))
    states, pictures = play(table, 12)
    hashes = [table.start_hash(i) for i in range(7)]
    assert len(set(hashes)) == 7
    for seed in (0, 5):  # alone, on a table that has played before
        table.reset([seed])
        state, picture = play(table, 12)
        np.testing.assert_array_equal(state[:, 0], states[: len(state), seed])
        np.testing.assert_array_equal(picture[:, 0], pictures[: len(picture), seed])
        assert table.start_hash(0) == hashes[seed]


@pytest.mark.parametrize("env_id", TASKS)
def test_resetting_some_rows_leaves_the_others(env_id):
    table, other = make_tabletop(env_id), make_tabletop(env_id)
    table.reset([1, 2, 3])
    for _ in range(3):
        table.step(Expert(table).act())
    before = table.state
    table.reset([9], rows=[1])
    other.reset([9])
    np.testing.assert_array_equal(table.state[[0, 2]], before[[0, 2]])
    np.testing.assert_array_equal(table.state[1], other.state[0])
    np.testing.assert_array_equal(table.render(rows=[1]), other.render())
    assert table.steps.tolist() == [3, 0, 3]
    assert table.instructions[1] == other.instructions[0]
    assert table.start_hash(1) == other.start_hash(0)


def test_distractors_and_noise_leave_the_rest_of_a_scene_alone():
    for env_id in ("vola/Detour-v0", "vola/Compose-v0"):
        full, bare = make_tabletop(env_id), make_tabletop(env_id, distractors=0, **DISTURBED)
        full.reset(np.arange(5))
        bare.reset(np.arange(5))
        assert bare.world.objects.shape[1] == 1
        np.testing.assert_array_equal(full.state, bare.state)
        np.testing.assert_array_equal(full.world.goal, bare.world.goal)
        assert full.instructions == bare.instructions


def test_noise_and_kicks_are_common_random_numbers():
    """The disturbance of a step depends on the seed only: not on actions, time limit or the other knob."""

    def pushes(**knobs):
        table = make_tabletop("vola/Compose-v0", **knobs)
        table.reset(np.arange(50))
        table.world.robot[:] = 0
        return table.step(np.zeros((50, 2))).state.astype(float)

    noise, kick = pushes(noise=0.1), pushes(kick_probability=0.5, kick_size=0.1)
    assert (np.abs(noise) > 0).all()
    np.testing.assert_allclose(pushes(noise=0.1, kick_probability=0.5, kick_size=0.1), noise + kick, atol=1e-6)
    np.testing.assert_array_equal(pushes(noise=0.1, time_limit=99), noise)
    np.testing.assert_array_equal(pushes(kick_probability=0.5, kick_size=0.1, time_limit=99), kick)


def test_finished_scenes_stay_as_they_are():
    table = make_tabletop("vola/Detour-v0", noise=0.5)
    table.reset(np.arange(20))
    up = np.tile([0.0, 0.12], (20, 1))
    while not table.done.any():
        last = table.step(up)
    frozen = np.flatnonzero(table.done)
    assert len(frozen) < 20
    state, picture, steps = table.state[frozen], table.render(rows=frozen), table.steps[frozen]
    up[frozen] = np.nan  # nobody plans for a finished scene, so its row may hold anything
    for _ in range(3):
        result = table.step(up)
        up[table.done] = np.nan
    np.testing.assert_array_equal(result.state[frozen], state)
    np.testing.assert_array_equal(table.render(rows=frozen), picture)
    np.testing.assert_array_equal(table.steps[frozen], steps)
    for name in ("terminated", "truncated", "success", "failure"):
        np.testing.assert_array_equal(getattr(result, name)[frozen], getattr(last, name)[frozen])


def test_actions_are_shortened_to_the_speed_limit_and_noise_has_the_stated_size():
    table = make_tabletop("vola/Compose-v0", noise=0.5)
    table.reset(np.arange(2000))
    table.world.robot[:] = 0
    moved = table.step(np.tile([3.0, 4.0], (2000, 1))).state  # ten times too long
    np.testing.assert_allclose(moved.mean(0), [0.12 * 0.6, 0.12 * 0.8], atol=0.004)
    np.testing.assert_allclose(moved.std(0), 0.5 * 0.12, rtol=0.05)
    table = make_tabletop("vola/Compose-v0", kick_probability=0.25, kick_size=0.3)
    table.reset(np.arange(2000))
    table.world.robot[:] = 0
    length = np.linalg.norm(table.step(np.zeros((2000, 2))).state, axis=1)
    kicked = length > 0
    assert kicked.mean() == pytest.approx(0.25, abs=0.03)
    np.testing.assert_allclose(length[kicked], 0.3, atol=1e-6)


def test_the_wall_ends_an_episode():
    table = make_tabletop("vola/Detour-v0")
    table.reset(np.arange(200))
    while not table.done.all():
        result = table.step(np.tile([0.0, 0.12], (200, 1)))
    assert (result.failure == "collision").all()
    assert result.terminated.all()
    assert not result.success.any()


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000))
def test_no_way_leads_through_the_wall(seed):
    """Also a fast robot with large kicks never is inside the wall, and never passes it within one step."""
    table = make_tabletop("vola/Detour-v0", speed=0.25, kick_probability=0.3)
    table.reset(np.arange(40) + seed)
    rng, task, half = np.random.default_rng(seed), table.config.task, np.array([0.30, 0.10])
    for _ in range(10):
        before = table.world.robot.copy()
        table.step(rng.uniform(-0.2, 0.2, (40, 2)) + (0, 0.1))
        inside = np.maximum(np.abs(table.world.robot - table.world.wall) - half, 0)
        assert (np.linalg.norm(inside, axis=1) >= task.robot_radius).all()
        way = before + np.linspace(0, 1, 40)[:, None, None] * (table.world.robot - before)
        deep = (np.abs(way - table.world.wall) < half - 0.05).all(axis=2)
        assert not deep.any()


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000))
def test_pushing_moves_the_block_away_and_nothing_overlaps(seed):
    table = make_tabletop("vola/Push-v0", kick_probability=0.1)
    table.reset(np.arange(60) + seed)
    rng, task = np.random.default_rng(seed), table.config.task
    contact = task.robot_radius + task.block_radius
    for _ in range(40):
        robot, block = table.world.robot.copy(), table.world.block.copy()
        aim = block - robot + rng.normal(0, 0.2, (60, 2))
        live = ~table.done
        table.step(aim)
        world = table.world
        assert (distance(world.robot, world.block) > contact - 1e-6).all()
        assert (np.abs(world.block) <= task.rail + 1e-9).all()
        far = live & (distance(robot, block) > contact + task.speed + task.robot_radius + 0.2)
        np.testing.assert_array_equal(world.block[far], block[far])


def test_a_straight_push_moves_the_block_straight():
    table = make_tabletop("vola/Push-v0")
    table.reset([0])
    table.world.robot[:], table.world.block[:], table.world.goal[:] = (-0.3, 0.1), (0.0, 0.1), (9, 9)
    for _ in range(6):
        state = table.step([[0.06, 0.0]]).state[0]
    np.testing.assert_allclose(state[:4], [0.06, 0.1, 0.25, 0.1], atol=1e-6)
    np.testing.assert_allclose(state[4:], [3 * 0.19, 0], atol=1e-6)


def reach(table, point):
    """Go to ``point`` in small steps and stay there until the time is over."""
    while not table.done.all():
        result = table.step(point - table.world.robot)
    return result


def test_staying_at_another_object_is_reported_as_such():
    table = make_tabletop("vola/Detour-v0", wall_jitter=(0.0, 0.0))
    table.reset(np.arange(30))
    table.world.robot[:] = (0.0, 0.4)  # past the wall
    result = reach(table, table.world.objects[:, 2].copy())
    # on its way the robot may cross the right disc, which is a success
    assert set(result.failure) == {"", "wrong_object"}
    assert (result.success == (result.failure == "")).all()
    assert Counter(result.failure.tolist())["wrong_object"] > 15
    assert result.truncated[~result.success].all()
    table = make_tabletop("vola/Detour-v0", distractors=0, time_limit=3)
    table.reset([0])
    assert reach(table, table.world.robot.copy()).failure.tolist() == ["timeout"]


def test_compose_is_judged_at_the_end():
    table = make_tabletop("vola/Compose-v0")
    table.reset(np.arange(50))
    goal, task = table.world.goal.copy(), table.config.task
    for _ in range(task.time_limit - 1):
        assert not table.step(goal - table.world.robot).success.any()
    assert (distance(table.world.robot, goal) < 0.01).all()
    away = np.where(np.arange(50)[:, None] < 25, 0.0, [[0.12, 0.0]])
    result = table.step(away)
    assert result.success.tolist() == [True] * 25 + [False] * 25
    assert result.terminated.tolist() == result.success.tolist()
    table.reset(np.arange(50))
    steps = np.array(list(PLACES.values())) * task.place_distance
    right = table.world.objects[:, 0]
    opposite = 2 * right - table.world.goal
    assert set(reach(table, opposite).failure) == {"wrong_place"}
    table.reset(np.arange(50))
    assert set(reach(table, table.world.objects[:, 1] + steps[0]).failure) == {"wrong_object"}
    table.reset(np.arange(50))
    assert set(reach(table, np.array([10.0, 10.0])).failure) == {"timeout"}


def test_held_out_combinations_are_disjoint_but_share_every_word():
    seen, held_out = combinations("seen"), combinations("held_out")
    assert len(seen) == 36
    assert len(held_out) == 12
    assert set(seen).isdisjoint(held_out)
    assert set(seen) | set(held_out) == set(combinations("all"))
    for i, size in enumerate((len(COLOURS), len(SHAPES), len(PLACES))):
        for split in (seen, held_out):
            assert {c[i] for c in split} == set(range(size))
    said = {}
    for split in ("seen", "held_out", "all"):
        table = make_tabletop("vola/Compose-v0", split=split)
        table.reset(np.arange(800))
        said[split] = set(table.instructions)
    assert len(said["seen"]) == 36
    assert len(said["held_out"]) == 12
    assert said["seen"] | said["held_out"] == said["all"]
    assert not said["seen"] & said["held_out"]


def test_instructions_name_what_is_there_and_only_that():
    """The named colour and shape occur once each in combination, and the goal is on the table."""
    table = make_tabletop("vola/Compose-v0")
    table.reset(np.arange(500))
    world = table.world
    pairs = world.colours * 3 + world.shapes
    assert (pairs[:, 1:] != pairs[:, :1]).all()
    assert (world.colours[:, 1] == world.colours[:, 0]).all()
    assert (world.shapes[:, 2] == world.shapes[:, 0]).all()
    assert (world.colours[:, 3] != world.colours[:, 0]).all()
    assert (world.shapes[:, 3] != world.shapes[:, 0]).all()
    assert (np.abs(world.goal) < 1).all()
    for text, c, s in zip(table.instructions, world.colours[:, 0], world.shapes[:, 0], strict=True):
        assert text.endswith(f"the {COLOURS[c]} {SHAPES[s]}")
    for env_id in ("vola/Detour-v0", "vola/Push-v0"):
        table = make_tabletop(env_id)
        table.reset(np.arange(200))
        for text, colours in zip(table.instructions, table.world.colours, strict=True):
            assert COLOURS[colours[0]] in text.split()
            assert len(set(colours)) == len(colours)


@pytest.mark.parametrize("env_id", TASKS)
def test_pictures_show_the_scene(env_id):
    table = make_tabletop(env_id)
    table.reset(np.arange(4))
    large, small = table.render(256), table.render()
    assert large.shape == (4, 256, 256, 3)
    assert small.shape == (4, 48, 48, 3)
    assert np.median(large) == 240
    if env_id != "vola/Push-v0":  # a ring is hollow in the middle
        x, y = table.world.objects[1, 0] + (0.065 * (env_id == "vola/Insert-v0"), 0)  # a slot too, so look beside it
        if table.config.task.name == "detour" or table.world.shapes[1, 0] != 1:
            shown = large[1, int((1 - y) * 128), int((x + 1) * 128)]
            np.testing.assert_array_equal(shown, PALETTE[table.world.colours[1, 0]])
    # the small picture is the large one seen from afar
    coarse = large[:, :240, :240].reshape(4, 48, 5, 48, 5, 3)  # only the sizes' common mean matters
    assert coarse.mean() == pytest.approx(small.astype(float).mean(), abs=1.5)
    before = table.render()
    table.step(np.full((4, 2), 0.05))
    assert (table.render() != before).any(axis=(1, 2, 3)).all()


def test_observation_fits_the_spec():
    for env_id in TASKS:
        table = make_tabletop(env_id, image_size=32)
        table.reset([3, 4])
        observation = table.observe()
        observation.check(table.spec)
        assert observation.images["top"].shape == (2, 1, 3, 32, 32)
        np.testing.assert_array_equal(observation.images["top"][:, 0].transpose(0, 2, 3, 1), table.render())
        np.testing.assert_array_equal(observation.state[:, 0], table.state)
        assert (np.abs(table.state) <= table.config.task.state_limit).all()


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([[0.1, 0.1]], r"\(n 2\) with n=2"),
        ([[0.1, 0.1, 0], [0, 0, 0]], r"\(n 2\)"),
        ([[0.1, 0.1], [np.nan, 0]], "finite.*scene 1"),
        ([[np.inf, 0.1], [0, 0]], "finite.*scene 0"),
    ],
)
def test_unusable_actions_are_refused(actions, message):
    table = make_tabletop("vola/Push-v0")
    table.reset([0, 1])
    before = table.state
    with pytest.raises(InputError, match=message):
        table.step(np.array(actions))
    np.testing.assert_array_equal(table.state, before)


def test_unusable_seeds_and_rows_are_refused():
    table = make_tabletop("vola/Detour-v0")
    with pytest.raises(InputError, match="reset"):
        table.step(np.zeros((1, 2)))
    for seeds in ([], [-1], [0.5], 3, [[1, 2]]):
        with pytest.raises(InputError, match="seeds"):
            table.reset(seeds)
    table.reset([0, 1])
    for seeds, rows in (([5], [2]), ([5, 6], [0]), ([5, 6], [1, 1]), ([5], [-1])):
        with pytest.raises(InputError, match="rows"):
            table.reset(seeds, rows=rows)


def test_settings_errors_name_the_nearest_match():
    with pytest.raises(ConfigError, match=r"Did you mean 'vola/Detour-v0'"):
        make_tabletop("Detour")
    with pytest.raises(ConfigError, match=r"Did you mean 'wall_half_width'"):
        make_tabletop("vola/Detour-v0", wall_width=0.2)
    assert make_tabletop("vola/Detour-v0", wall_half_width=0.2).config.task.wall_half_width == 0.2
    for env_id, wrong in (
        ("vola/Detour-v0", {"wall_half_width": 0.7}),
        ("vola/Detour-v0", {"wall_half_height": 0.3}),
        ("vola/Detour-v0", {"distractors": 4}),
        ("vola/Detour-v0", {"speed": 0.0}),
        ("vola/Push-v0", {"ring_distance": 0.9}),
        ("vola/Push-v0", {"noise": -0.1}),
        ("vola/Compose-v0", {"split": "heldout"}),
        ("vola/Compose-v0", {"kick_probability": 1.5}),
        ("vola/Compose-v0", {"kick_size": 1.0}),
        ("vola/Compose-v0", {"image_size": 4}),
        ("vola/Compose-v0", {"time_limit": 2.5}),
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            make_tabletop(env_id, **wrong)


def test_the_core_needs_no_gymnasium():
    code = "import sys, vola.envs.experts, vola.envs.gym_ids; assert not {'gymnasium', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
