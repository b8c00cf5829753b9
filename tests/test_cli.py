"""The command line: fast help, one door for errors, and the same power as Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from vola import checkpoint
from vola.cli import main, parse_overrides
from vola.errors import ConfigError
from vola.train import loop

TINY = ["--size", "tiny", "--set", "train.steps=2", "train.batch=4"]


def vola(*arguments: object) -> int:
    """Exit status of a command run in this process."""
    try:
        main([str(a) for a in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture(scope="module")
def task_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run on a built-in task, its demonstrations in run/data."""
    run = tmp_path_factory.mktemp("cli") / "run"
    status = vola("train", "vola/Detour-v0", "--out", run, "--episodes", 8, "--eval-episodes", 4, "--val", 0.25, *TINY)
    assert status == 0
    return run


def test_a_run_leaves_every_record(task_run: Path) -> None:
    names = {f.name for f in task_run.iterdir()}
    wanted = {"system.json", "log.jsonl", "checkpoints", "rollouts.parquet", "samples.safetensors", "heldout.json"}
    assert wanted | {"summary.json", "report.html", "data"} <= names
    summary = json.loads((task_run / "summary.json").read_text())
    assert [(p["name"], p["role"], p["episodes"]) for p in summary["policies"]] == [
        ("pi0", "policy", 4),
        ("expert", "expert", 4),
    ]
    assert summary["policies"][1]["successes"] == 4
    assert summary["dataset"]["train_episodes"] + summary["dataset"]["val_episodes"] == 8
    assert 0 < summary["flops_share"] < 1
    assert summary["fingerprint"] == checkpoint.load(task_run).manifest["fingerprint"]


def test_eval_report_show_info(task_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vola("eval", task_run, "--episodes", 4, "--k", 1) == 0
    assert "of 4 = " in capsys.readouterr().out
    assert vola("eval", task_run, "--episodes", 0) == 1
    assert "--episodes: expected at least 1" in capsys.readouterr().err
    (recorded,) = (json.loads(line) for line in (task_run / "evaluations.jsonl").read_text().splitlines())
    assert (recorded["episodes"], recorded["executor"]) == (4, {"part": "Receding", "k": 1})
    (task_run / "report.html").unlink()
    assert vola("report", task_run) == 0
    assert "Evaluated again" in (task_run / "report.html").read_text()
    capsys.readouterr()
    assert vola("show", task_run) == 0
    text = capsys.readouterr().out
    for word in ("fingerprint", "Layout", "action", "Parameters", "Normaliser of action", "reads", "passes"):
        assert word in text
    assert vola("show", "pi0", "--size", "tiny") == 0
    assert "ConvStem" in capsys.readouterr().out
    assert vola("data", "info", task_run / "data") == 0
    assert "go to the" in capsys.readouterr().out


def test_train_on_a_dataset_without_environment(task_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = tmp_path / "run"
    capsys.readouterr()
    assert vola("train", task_run / "data", "--out", run, "--val", 0.25, "--system", "regression", *TINY) == 0
    text = capsys.readouterr().out
    for method in ("regression", "holding the last action", "the mean action", "linear extrapolation"):
        assert method in text
    assert not (run / "rollouts.parquet").exists()
    assert (run / "report.html").exists()


def test_a_task_of_another_robot_is_refused_before_any_work(task_run: Path, tmp_path: Path, capsys) -> None:
    assert vola("train", task_run / "data", "--env", "vola/Push-v0", "--out", tmp_path / "x", *TINY) == 1
    assert "expected a task whose state" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    assert vola("eval", task_run, "--env", "vola/Push-v0") == 1
    assert "expected a task whose state" in capsys.readouterr().err


def test_eval_needs_a_task_where_the_run_has_none(task_run: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    assert vola("train", task_run / "data", "--out", run, "--val", 0, "--no-report", *TINY) == 0
    assert vola("eval", run, "--episodes", 2) == 1
    assert "say which with --env" in capsys.readouterr().err
    assert vola("eval", tmp_path) == 1
    assert str(run) in capsys.readouterr().err


def test_ctrl_c_ends_with_130_and_everything_saved(task_run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    run, original, calls = tmp_path / "run", loop._step, []

    def step(*args: object) -> dict[str, float]:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(loop, "_step", step)
    base = ["train", task_run / "data", "--out", run, "--val", 0.25, *TINY, "train.steps=9"]
    assert vola(*base) == 130
    err = capsys.readouterr().err
    assert "stopping after this step" in err
    assert "--resume" in err
    assert checkpoint.load(run).step == 2
    monkeypatch.undo()
    assert vola(*base, "--resume") == 0
    assert checkpoint.load(run).step == 9
    assert (run / "report.html").exists()


def test_a_folder_that_cannot_be_used_is_one_sentence(task_run: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("x")
    assert vola("train", task_run / "data", "--out", tmp_path / "file" / "run", *TINY) == 1
    assert "Not a directory" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "x"


def test_a_repeated_set_is_refused(task_run: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "x"
    assert vola("train", task_run / "data", "--out", out, "--set", "H=3", "--set", "train.steps=2") == 1
    assert "expected once, with all settings behind it" in capsys.readouterr().err
    assert not out.exists()


def test_resume_from_the_command_line(task_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, data = tmp_path / "run", task_run / "data"
    base = ["train", data, "--out", run, "--val", 0.25, "--no-report", *TINY]
    assert vola(*base) == 0
    assert vola(*base) == 1
    assert "--resume" in capsys.readouterr().err
    assert vola(*base, "train.steps=3", "--resume") == 0
    assert checkpoint.load(run).step == 3


def test_collect_and_settings_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vola("data", "collect", "vola/Push-v0", "--out", tmp_path / "push", "--episodes", 3) == 0
    assert "3 episodes" in capsys.readouterr().out
    assert vola("data", "collect", "vola/Push-v0", "--out", tmp_path / "push", "--episodes", 3) == 1
    assert "Nothing is overwritten" in capsys.readouterr().err
    assert vola("data", "collect", "vola/Pusch-v0", "--out", tmp_path / "x") == 1
    assert "Did you mean 'vola/Push-v0'" in capsys.readouterr().err
    assert vola("data", "info", tmp_path) == 1
    assert "expected" in capsys.readouterr().err
    assert vola("train", tmp_path / "push", "--out", tmp_path / "r", "--set", "train.stepz=3") == 1
    assert "Did you mean 'train.steps'" in capsys.readouterr().err
    assert vola("train", tmp_path / "push", "--out", tmp_path / "r", "--system", "pi9") == 1
    assert "expected one of" in capsys.readouterr().err
    assert vola("show", tmp_path / "nothing") == 1
    assert "expected a checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_overrides_parse_as_json_or_text() -> None:
    assert parse_overrides(["H=32", "head.time=beta", "image_size=[64, 64]", "train.lr=1e-3"]) == {
        "H": 32, "head.time": "beta", "image_size": [64, 64], "train.lr": 1e-3,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        parse_overrides(["H32"])


def test_help_is_fast_and_light() -> None:
    """Below half a second on an idle machine: here relative to starting Python with numpy, which the help needs."""
    code = (
        "import sys; sys.argv = ['vola', '--help']\ntry:\n import vola.cli; vola.cli.main()\nexcept SystemExit: pass\n"
    )
    code += "assert 'torch' not in sys.modules and 'pyarrow' not in sys.modules"

    def seconds(program: str) -> float:
        best = np.inf
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(code) < 0.5 or seconds(code) < 5 * seconds("import numpy")


def test_module_and_command_are_the_same() -> None:
    done = subprocess.run([sys.executable, "-m", "vola", "data", "--help"], capture_output=True, text=True, check=True)
    assert "collect" in done.stdout
    assert "info" in done.stdout
