"""Every command and the Python example of the README run, made small; every number in it comes from a record."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from vola.cli import main
from vola.data.lerobot_write import LeRobotWriter
from vola.types import ActionSpec, CameraSpec, RobotSpec, StateSpec

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

# Appended to (or put in place of) a command's own arguments, so that it ends in seconds.
SHRINK = {
    "train": ["--size", "tiny", "--eval-episodes", "2"],
    "collect": [],
    "eval": ["--episodes", "2"],
    "lab": ["--scale", "0.001", "--size", "tiny", "--seeds", "1", "--episodes", "2", "--processes", "1"],
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[list[str]]:
    return [shlex.split(line) for block in blocks("bash") for line in block.splitlines() if line.strip()]


def shrunk(command: list[str], data: str) -> list[str]:
    """The same command with small numbers."""
    out = [data if a == "data/g1_bottle" else a for a in command]
    out = [re.sub(r"^train\.steps=\d+$", "train.steps=2", a) for a in out]
    out = [re.sub(r"^(T|H)=\d+$", lambda m: m[0][0] + "=3", a) for a in out]
    out = [re.sub(r"^execute\.(k|delay)=\d+$", lambda m: f"execute.{m[1]}=1", a) for a in out]
    for flag, value in (("--episodes", "10"), ("--k", "2"), ("--dagger", "1")):
        if flag in out:
            out[out.index(flag) + 1] = value
    name = out[2] if out[1] == "data" else out[1]
    more = SHRINK.get(name, [])
    if name == "lab" and len(out) == 2:  # the list of experiments
        more = []
    if name == "train" and "runs/g1" not in out:
        more = [*more, "--no-report"]
    if name == "train" and "--dagger" in out:
        more = [*more, "--dagger-episodes", "2"]
    if name == "train" and out[2].startswith("vola/") and "--episodes" not in out:
        more = [*more, "--episodes", "10"]
    return out[1:] + more


def test_every_command_is_make_or_vola() -> None:
    assert len(commands()) >= 8
    assert {c[0] for c in commands()} == {"make", "vola"}
    makefile = (ROOT / "Makefile").read_text()
    for command in commands():
        if command[0] == "make":
            assert re.search(rf"^{command[1]}:", makefile, flags=re.MULTILINE)


@pytest.fixture
def robot(tmp_path: Path) -> Path:
    """A small recording like the README's: state and action share their names, and one video is missing."""
    names, rng = ("shoulder", "elbow"), np.random.default_rng(0)
    spec = RobotSpec(
        (CameraSpec("cam_high", 48, 64),),
        StateSpec(names, ("rad", "rad")),
        ActionSpec(names, ("rad", "rad"), ("position", "position"), 30.0),
    )
    path = tmp_path / "robot"
    with LeRobotWriter(path, spec, 30.0, video=True, video_files_size_in_mb=0) as writer:
        for _ in range(6):
            joints = rng.standard_normal((12, 2)).cumsum(0).astype(np.float32)
            images = {"cam_high": rng.integers(0, 255, (12, 48, 64, 3), dtype=np.uint8)}
            writer.add_episode(images, joints, joints, "pick up the bottle")
    sorted(path.rglob("*.mp4"))[2].unlink()
    return path


def test_vola_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, robot: Path) -> None:
    monkeypatch.chdir(tmp_path)
    ran = []
    for command in commands():
        if command[0] == "vola":
            main(shrunk(command, str(robot)))
            ran.append(command[1])
    assert set(ran) >= {"train", "eval", "show", "data"}
    assert (tmp_path / "runs" / "g1" / "report.html").exists()


def test_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    examples = blocks("python")
    assert len(examples) == 2
    assert len([line for line in examples[0].splitlines() if line.strip() and "import" not in line]) <= 20
    shrink = {"episodes=3000": "episodes=20", '"train.steps": 4000': '"train.steps": 2', "SEED + 200": "SEED + 4"}
    shrink |= {"pi0.small": "pi0.tiny", "Receding(k=4)": "Receding(k=2)"}
    for old, new in shrink.items():
        assert examples[0].count(old) == 1
        examples[0] = examples[0].replace(old, new)
    monkeypatch.chdir(tmp_path)
    for example in examples:
        namespace: dict[str, object] = {}
        exec(compile(example, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "Rate(successes=" in printed
    assert "action reads" in printed
    assert np.asarray(namespace["action"]).shape == (1, 2)


def test_picture_and_links_exist() -> None:
    for target in re.findall(r"\]\(([^)h][^)]*)\)", README):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`(src/[^`]*)`", README):
        assert (ROOT / path).exists(), path
