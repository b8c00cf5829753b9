"""`vola data info`: what it prints is true, from the numbers alone; and R09, the share of idle frames."""

import io
from dataclasses import replace

import numpy as np
import pytest
from data_tools import memory, record, spec
from rich.console import Console

from vola.cli import main
from vola.data.episodes import Episode, MemoryDataset
from vola.data.idle import idle_frames
from vola.data.lerobot import LeRobotDataset, open_lerobot
from vola.data.summary import describe
from vola.data.windows import Windows
from vola.errors import ConfigError, InputError
from vola.types import ActionSpec


def text(data, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(describe(data))
    return out.getvalue()


def lines(data, *words: str) -> list[str]:
    return [line for line in text(data).splitlines() if all(w in line for w in words)]


# --- idle frames ---


def moving(kinds: tuple[str, ...], *actions: np.ndarray) -> MemoryDataset:
    A = len(kinds)
    robot = replace(spec(S=1, A=A, cameras=()), action=ActionSpec(spec(A=A).action.names, ("m",) * A, kinds, 10.0))
    episodes = tuple(Episode(i, len(a), "push the red disc") for i, a in enumerate(actions))
    columns = {"state": [np.zeros((len(a), 1), np.float32) for a in actions]}
    return MemoryDataset(robot, 10.0, episodes, columns | {"action": [a.astype(np.float32) for a in actions]}, {})


def hundred() -> np.ndarray:
    """100 frames of two offsets and a gripper: 60 idle, 5 in which the gripper alone changes, 35 moving."""
    rng = np.random.default_rng(0)
    action = np.zeros((100, 3))
    action[:35, :2] = rng.uniform(0.01, 0.05, (35, 2)) * rng.choice([-1, 1], (35, 2))
    action[35:, :2] = 1e-5 * rng.standard_normal((65, 2))
    action[50:60, 2], action[70:80, 2], action[90:, 2] = 1, 1, 1
    return action


def test_R09_idle_share_and_filter() -> None:
    data = moving(("delta", "delta", "gripper"), hundred(), np.zeros((7, 3)), hundred()[:35])
    idle = idle_frames(data, [0, 1, 2])
    assert idle[0].mean() == 0.60
    kept = np.flatnonzero(~idle[0])
    assert len(kept) == 40
    assert {50, 60, 70, 80, 90} <= set(kept)
    assert idle[1].all()
    assert not idle[2].any()
    # The filter: windows start at moving frames only; an episode that never moves is refused, not emptied.
    starts = {e: ~mask for e, mask in idle.items()}
    assert Windows(data, [0, 2], starts=starts).frame[:40].tolist() == kept.tolist()
    with pytest.raises(InputError, match="episode 1 has no frame left"):
        Windows(data, [0, 1], starts=starts)
    shown = text(data)
    assert f"{67 / 142:.1%} of the frames" in shown
    assert "most in episode 1 100%, episode 0 60%" in shown
    assert "never moving: episode 1." in shown


def test_R09_absolute_targets_are_idle_when_they_repeat() -> None:
    """Standing at 5 is idle for a target, not for a velocity; the first frame is judged by the step that follows."""
    action = np.concatenate([np.arange(6.0), np.full(4, 5.0)])[:, None]
    assert idle_frames(moving(("position",), action), [0])[0].tolist() == [False] * 6 + [True] * 4
    assert not idle_frames(moving(("velocity",), action[1:]), [0])[0].any()
    assert idle_frames(moving(("unknown",), action[5:]), [0])[0].all()
    with pytest.raises(ConfigError, match=r"still: expected a share in \[0, 1\), got 1.0"):
        idle_frames(moving(("position",), action), [0], still=1.0)


# --- the description ---


def test_numbers_are_those_of_the_data() -> None:
    data = memory((3, 7, 5))
    state = np.concatenate(data.columns["state"])
    (row,) = lines(data, "s0")
    numbers = [state[:, 0].min(), state[:, 0].mean(), state[:, 0].max(), state[:, 0].std()]
    assert row.split()[1:5] == [f"{n:.4g}" for n in numbers]
    assert float(row.split()[5]) == pytest.approx(np.abs(state[:, 0] - numbers[1]).max() / numbers[3], abs=0.06)
    shown = text(data)
    assert "episodes  3  (3 to 7 frames, median 5)" in shown
    assert "frames    15 at 10 fps = 1.5 s" in shown
    assert "state, 3 dimensions, unit rad" in shown
    assert "action, 2 dimensions, unit m" in shown
    assert [line.split()[:2] for line in lines(data, "a1")] == [["a1", "gripper"]]
    assert lines(data, "top", "8x8", "in memory")
    assert lines(data, "push the red disc")[0].split()[0] == "2"


def test_constants_outliers_and_unknown_meanings_are_pointed_out() -> None:
    rng = np.random.default_rng(0)
    target = np.cumsum(rng.standard_normal((1000, 1)), 0)
    action = np.concatenate([target, np.full((1000, 1), 0.04), 1e-3 * rng.standard_normal((1000, 1))], 1)
    action[500, 2] = 5
    data = moving(("unknown",) * 3, action)
    shown = text(data)
    assert "constant" in lines(data, "a1")[0]
    assert "action: constant dimension a1; a normaliser maps it to 0" in shown
    assert "action: dimension a2 reaches over 20 standard deviations" in shown
    assert "does not say what its actions are" in shown


@pytest.mark.parametrize(("kind", "verdict"), [("target", "absolute targets"), ("offset", "offsets or velocities")])
def test_actions_of_unknown_kind_are_told_apart_by_the_state(kind, verdict) -> None:
    state = np.cumsum(np.random.default_rng(0).standard_normal((200, 2)), 0)
    change = np.diff(state, axis=0, append=state[-1:])
    robot = spec(S=2, A=2, cameras=())
    action = ActionSpec(robot.state.names, ("unknown",) * 2, ("unknown",) * 2, 10.0)
    columns = {"state": [state.astype(np.float32)], "action": [(state + change if kind == "target" else change)]}
    data = MemoryDataset(replace(robot, action=action), 10.0, (Episode(0, 200, "go"),), columns, {})
    assert f"they look like {verdict}" in " ".join(text(data).split())


def test_nothing_is_decoded(tmp_path, monkeypatch) -> None:
    data = open_lerobot(record(tmp_path / "set", memory(), video=True))

    def refuse(*arguments):
        raise AssertionError("a frame was decoded")

    monkeypatch.setattr(LeRobotDataset, "frames", refuse)
    shown = text(data)
    assert "video, h264" in shown
    assert str(tmp_path / "set") in shown.replace("\n", "")


def test_many_tasks_are_shortened_and_markup_is_shown_as_it_is() -> None:
    data = memory((2,) * 12, spec(cameras=()))
    episodes = tuple(replace(e, instruction=f"[bold]task {e.index}[/]") for e in data.episodes)
    shown = text(replace(data, episodes=episodes))
    assert "tasks, 12" in shown
    assert "[bold]task 0[/]" in shown
    assert "4 more tasks" in shown
    assert "no cameras" in shown


def test_a_real_set_fits_a_terminal(shared) -> None:
    data = open_lerobot(shared / "data/g1_bottle")
    shown = text(data)
    assert max(len(line) for line in shown.splitlines()) <= 100
    flat = " ".join(shown.split())
    for words in (
        "LeRobot v2.1",
        "episodes 12 (221 to 307 frames, median 279)",
        "3,319 at 30 fps = 1 min 51 s",
        "state, 26 dimensions",
        "kRightHandThumbRotation",
        "cam_high 480x640 video, av1",
        "12 Pick up the yellow bottle on the table.",
        "88 of 100 episodes lack a video",
        "they look like absolute targets",
    ):
        assert words in flat


def test_the_command_prints_it_and_names_a_wrong_folder(tmp_path, capsys) -> None:
    main(["data", "info", str(record(tmp_path / "set", memory()))])
    assert "5  (3 to 9 frames, median 5)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["data", "info", str(tmp_path)])
    assert "expected a LeRobot dataset folder (one that holds meta/info.json)" in capsys.readouterr().err
