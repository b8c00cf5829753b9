"""Insert, Chase and Gust: geometry, judgement, experts over 2000 scenes, and the property each was made for."""

from collections import Counter

import numpy as np
import pytest
from scipy.stats import norm

from vola.envs.chase import LANE_HALF_HEIGHT, LANE_HALF_WIDTH, LANES, future, move_discs
from vola.envs.experts import LEFT, RIGHT, Expert, detour_move, nearer_sides, scene_requests
from vola.envs.gym_env import action_space
from vola.envs.tabletop import make_tabletop
from vola.errors import ConfigError


def play(table, act):
    while not table.done.all():
        table.step(act())
    return table


def expert_rate(env_id, sides=None, n=2000, **settings):
    """Successes of the expert out of n scenes."""
    table = make_tabletop(env_id, **settings)
    table.reset(np.arange(n))
    expert = Expert(table, None if sides is None else np.full(n, sides))
    return int(play(table, expert.act).success.sum())


def test_start_states_of_the_older_tasks_are_what_they_were():
    for env_id, hashes in (
        ("vola/Detour-v0", ["e5a465689490", "25f125f5a3e2", "689eaafdb9a6"]),
        ("vola/Push-v0", ["44d83d86f79c", "a25f3bd363ff", "377eaa16fc01"]),
        ("vola/Compose-v0", ["7bffafc2f3cd", "0a0dfb9e6dcf", "368563e910d7"]),
    ):
        table = make_tabletop(env_id)
        table.reset(np.arange(3))
        assert [table.start_hash(i) for i in range(3)] == hashes


@pytest.mark.parametrize(
    ("env_id", "settings", "sides", "successes"),
    [
        ("vola/Insert-v0", {}, None, 2000),
        ("vola/Insert-v0", {"actions": "delta"}, None, 2000),
        ("vola/Insert-v0", {"noise": 0.1}, None, 2000),
        ("vola/Insert-v0", {"tolerance": 0.005}, None, 2000),
        ("vola/Chase-v0", {}, None, 2000),
        ("vola/Chase-v0", {"target_speed": 0.15}, None, 2000),
        ("vola/Gust-v0", {}, None, 2000),
        ("vola/Gust-v0", {}, LEFT, 2000),
        ("vola/Gust-v0", {}, RIGHT, 1999),
        ("vola/Gust-v0", {"kick_probability": 0.0}, RIGHT, 2000),
    ],
)
def test_measured_expert_successes(env_id, settings, sides, successes):
    assert expert_rate(env_id, sides, **settings) == successes


# Insert


def insert(n=40, **settings):
    table = make_tabletop("vola/Insert-v0", **settings)
    table.reset(np.arange(n))
    return table


def through(table, x):
    """Actions that cross the plate straight up at x."""

    def act():
        robot, goal = table.world.robot, table.world.goal
        there = np.abs(robot[:, 0] - x) < 1e-9
        return np.stack([x, np.where(there, 1.0, np.minimum(robot[:, 1], goal[:, 1] - 0.1))], axis=1)

    return act


def test_the_crossing_error_is_recorded_and_decides():
    table = insert()
    assert np.isnan(table.measure).all()
    goal, error = table.world.goal[:, 0].copy(), np.linspace(-0.09, 0.09, 40)
    play(table, through(table, goal + error))
    np.testing.assert_allclose(table.measure, error, atol=1e-9)
    assert (table.success == (np.abs(error) < 0.03)).all()
    assert set(table.failure[~table.success]) == {"miss"}
    assert table.terminated.all()
    # One evaluation tells the success at every tolerance.
    for tolerance in (0.01, 0.05):
        other = insert(tolerance=tolerance)
        play(other, through(other, goal + error))
        assert (other.success == (np.abs(table.measure) < tolerance)).all()


def test_failures_of_insert_have_their_names():
    table = insert()
    assert (table.world.objects[:, 0] * table.world.objects[:, 1] < 0)[:, 0].all()  # one slot on each side
    play(table, through(table, table.world.objects[:, 1, 0].copy()))
    assert Counter(table.failure.tolist()) == {"wrong_slot": 40}
    assert (np.abs(table.measure) >= 0.4).all()
    table = insert()
    play(table, lambda: table.world.robot.copy())
    assert Counter(table.failure.tolist()) == {"timeout": 40}
    assert np.isnan(table.measure).all()
    table.reset([3], rows=[1])
    assert not table.done[1]


def test_a_slanted_way_is_judged_where_it_crosses_the_plate():
    table = insert(1, actions="delta")
    world = table.world
    world.robot[:] = world.goal - (0.06, 0.02)
    result = table.step([[0.09, 0.06]])  # a third of the way up, so a third of the way aside
    np.testing.assert_allclose(result.measure, [-0.03], atol=1e-12)
    assert result.measure == table.measure


def test_position_actions_are_places_and_delta_actions_ways():
    place, way = insert(), insert(actions="delta")
    assert place.spec.action.kinds == ("position", "position")
    assert place.spec.action.names == ("x", "y")
    assert way.spec.action.kinds == ("delta", "delta")
    assert action_space(place).high.tolist() == [1, 1]
    assert action_space(way).high.tolist() == pytest.approx([0.12, 0.12])
    target = np.random.default_rng(0).uniform(-3, 3, (40, 2))  # beyond the table: clipped
    target[:, 1] = -0.5
    np.testing.assert_allclose(
        place.step(target).state, way.step(np.clip(target, -1, 1) - way.world.robot).state, rtol=1e-6
    )
    np.testing.assert_allclose(Expert(place).act() - place.world.robot, Expert(way).act(), atol=1e-12)
    near = place.world.robot + (0.05, 0.0)
    np.testing.assert_allclose(place.step(near).state, near, atol=1e-6)


@pytest.mark.parametrize("K", [16, 32, 64])
def test_binned_positions_miss_as_the_law_of_uniform_bins_says(K):
    """An expert whose actions are rounded to the middle of K bins on [-1, 1] errs uniformly within +- 1/K: rms
    R / (K sqrt 12) with R = 2, success min(1, eps K); calibration.md section 5. Four standard errors, plus 2 %."""
    table = insert(1500)
    expert, half = Expert(table), 1.0 / K

    def act():
        # The expert waits for an alignment that bins cannot reach, so it is asked for its target, not its patience.
        robot, goal = table.world.robot, table.world.goal
        x = (np.floor(goal[:, 0] / (2 * half)) + 0.5) * 2 * half
        lined = np.abs(robot[:, 0] - x) < 1e-9
        return np.stack([x, np.where(lined, 1.0, np.minimum(robot[:, 1], goal[:, 1] - 0.1))], axis=1)

    assert expert.chunk_length == 1
    play(table, act)
    assert np.isfinite(table.measure).all()
    assert np.sqrt((table.measure**2).mean()) == pytest.approx(2 / (K * np.sqrt(12)), rel=0.06)
    for tolerance in (0.01, 0.02, 0.03):
        ideal = min(1.0, tolerance * K)
        spread = norm.ppf(0.99997) * np.sqrt(ideal * (1 - ideal) / 1500)
        assert (np.abs(table.measure) < tolerance).mean() == pytest.approx(ideal, abs=spread + 0.02)


# Chase


def test_discs_stay_in_their_lanes_at_constant_speed():
    table = make_tabletop("vola/Chase-v0", time_limit=300)
    table.reset(np.arange(50))
    world = table.world
    speed, lane = np.linalg.norm(world.velocity, axis=2), np.abs(world.objects[..., 1, None] - LANES).argmin(-1)
    np.testing.assert_allclose(speed, table.config.task.target_speed)
    assert (np.sort(lane, axis=1) == [0, 1, 2]).all()
    predicted = future(world, 100)
    world.robot[:] = (0, -1)
    for t in range(100):
        table.step(np.zeros((50, 2)))
        np.testing.assert_allclose(world.goal, world.objects[:, 0])
        np.testing.assert_allclose(world.goal, predicted[:, t], atol=1e-12)
        assert (np.abs(world.objects[..., 0]) <= LANE_HALF_WIDTH + 1e-12).all()
        assert (np.abs(world.objects[..., 1] - LANES[lane]) <= LANE_HALF_HEIGHT + 1e-12).all()
    np.testing.assert_allclose(np.linalg.norm(world.velocity, axis=2), speed)


def test_a_bounce_is_a_reflection():
    place, velocity = move_discs(np.array([LANE_HALF_WIDTH - 0.03, LANES[1]]), np.array([0.1, 0.0]))
    np.testing.assert_allclose(place, [LANE_HALF_WIDTH - 0.07, LANES[1]])
    np.testing.assert_allclose(velocity, [-0.1, 0.0])


def test_the_start_picture_does_not_show_velocity_but_two_pictures_do():
    table = make_tabletop("vola/Chase-v0")
    table.reset(np.arange(5))
    first, hashes = table.render(), [table.start_hash(i) for i in range(5)]
    table.world.velocity *= -1
    np.testing.assert_array_equal(table.render(), first)
    table.step(np.zeros((5, 2)))
    backward = table.render()
    table.reset(np.arange(5))
    table.step(np.zeros((5, 2)))
    assert (table.render() != backward).any(axis=(1, 2, 3)).all()
    assert [table.start_hash(i) for i in range(5)] == hashes
    faster = make_tabletop("vola/Chase-v0", target_speed=0.05)
    faster.reset(np.arange(5))
    assert [faster.start_hash(i) for i in range(5)] != hashes  # the start is more than its picture


def test_going_to_where_the_disc_is_comes_too_late():
    """Successes of pure pursuit in 2000 scenes, in percent: what the docstring of Chase says (within 1)."""
    for speed, percent in ((0.06, 100), (0.09, 93), (0.10, 81), (0.15, 73)):
        table = make_tabletop("vola/Chase-v0", target_speed=speed)
        table.reset(np.arange(2000))
        play(table, lambda table=table: table.world.goal - table.world.robot)
        assert 100 * table.success.mean() == pytest.approx(percent, abs=1)


# Gust


def test_the_wind_blows_below_the_wall_only():
    table = make_tabletop("vola/Gust-v0", kick_probability=0.0)
    table.reset(np.arange(6))
    before = table.world.robot.copy()
    table.step(np.zeros((6, 2)))
    np.testing.assert_allclose(table.world.robot - before, np.tile([0, 0.10], (6, 1)), atol=1e-12)
    table.world.robot[:] = table.world.wall + (0.5, 0.3)
    before = table.world.robot.copy()
    table.step(np.zeros((6, 2)))
    np.testing.assert_array_equal(table.world.robot, before)
    # doing nothing ends at the wall
    table.reset(np.arange(200))
    play(table, lambda: np.zeros((200, 2)))
    assert (table.failure == "collision").all()


def test_gust_is_shown_in_pairs_and_has_kicks_by_default():
    config = make_tabletop("vola/Gust-v0").config
    assert config.kick_probability == 0.2
    assert make_tabletop("vola/Gust-v0", kick_probability=0.0).config.kick_size == 0.12
    seeds, sides = scene_requests(config, 6, 0)
    assert (seeds.tolist(), sides.tolist()) == ([0, 0, 1, 1, 2, 2], [LEFT, RIGHT] * 3)


def undecided(k, n=1000, doubt=0.2, sloppiness=0.2, **settings):
    """Success of a synthetic policy: in every plan it draws its side anew (the sign of x plus normal ``doubt``, m),
    plans k steps without knowing of kicks, with one error per chunk (``sloppiness`` of the speed), and executes all."""
    table = make_tabletop("vola/Gust-v0", **settings)
    table.reset(np.arange(n))
    task, rng, step, plan = table.config.task, np.random.default_rng(0), 0, []
    while not table.done.all():
        if step % k == 0:
            world, plan = table.world.take(np.arange(n)), []
            aside = world.robot[:, 0] - world.wall[:, 0]
            side = np.where(aside + doubt * rng.standard_normal(n) > 0, RIGHT, LEFT)
            error = sloppiness * task.speed * rng.standard_normal((n, 2))
            for _ in range(k):
                plan.append(detour_move(task, world, side) + error)
                world.robot = world.robot + plan[-1] + task.carried(world)
        table.step(plan[step % k])
        step += 1
    return table.success.mean()


def test_success_against_k_has_an_interior_optimum_that_moves_down_with_the_kicks():
    """Measured, in percent: calm 95.1 (k=1) 98.5 (6) 100 (12); default 91.6, 95.7, 93.0; kicks in 40 % of the steps
    90.9, 92.5 (k=2), 88.7, 83.9. The differences asserted are at least 1.5 points, with common random numbers."""
    calm = {k: undecided(k, kick_probability=0.0) for k in (1, 6, 12)}
    default = {k: undecided(k) for k in (1, 6, 12)}
    stormy = {k: undecided(k, kick_probability=0.4) for k in (1, 2, 6, 12)}
    assert calm[1] + 0.015 < calm[6]
    assert calm[6] + 0.01 < calm[12]
    assert default[6] > max(default[1], default[12]) + 0.02
    assert stormy[2] > max(stormy[1], stormy[6]) + 0.012
    assert stormy[6] > stormy[12] + 0.02
    # Without doubt there is nothing to gain from commitment.
    sure = {k: undecided(k, doubt=0.0) for k in (1, 6)}
    assert sure[1] > sure[6]


def test_a_side_is_kept_until_the_robot_is_clearly_on_the_other_one():
    table = make_tabletop("vola/Gust-v0")
    table.reset([0, 1, 2, 3])
    world = table.world
    world.robot[:, 0] = world.wall[:, 0] + (-0.05, 0.05, -0.15, 0.15)
    assert nearer_sides(world).tolist() == [LEFT, RIGHT, LEFT, RIGHT]
    assert nearer_sides(world, np.array([RIGHT, LEFT, RIGHT, LEFT])).tolist() == [RIGHT, LEFT, LEFT, RIGHT]


@pytest.mark.parametrize(
    ("env_id", "wrong"),
    [
        ("vola/Insert-v0", {"tolerance": 0.0}),
        ("vola/Insert-v0", {"actions": "velocity"}),
        ("vola/Insert-v0", {"distractors": 2}),
        ("vola/Insert-v0", {"plate_y": (0.5, 0.4)}),
        ("vola/Insert-v0", {"slot_x": (0.0, 0.4)}),
        ("vola/Chase-v0", {"target_speed": 0.2}),
        ("vola/Chase-v0", {"distractors": 3}),
        ("vola/Chase-v0", {"goal_radius": 0.0}),
        ("vola/Gust-v0", {"wind": -0.1}),
    ],
)
def test_settings_that_make_no_task_are_refused(env_id, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        make_tabletop(env_id, **wrong)


def test_compose_told_by_number_is_the_same_scene_under_another_name() -> None:
    seeds = np.arange(40)
    words, number = (make_tabletop("vola/Compose-v0", told=told) for told in ("words", "number"))
    words.reset(seeds)
    number.reset(seeds)
    np.testing.assert_array_equal(words.world.goal, number.world.goal)
    pairs = set(zip(words.instructions, number.instructions, strict=True))
    assert len(pairs) == len(set(words.instructions)) == len(set(number.instructions))
    assert all(text.split()[0] == "task" and 0 <= int(text.split()[1]) < 48 for text in number.instructions)
