"""Training: resume is bit-exact, nothing on disk is lost, modes come back, schedules count optimiser steps."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tools import dataset, fitted, policy, system, windows
from vola import checkpoint
from vola.data.windows import batch_indices
from vola.errors import CheckpointError, ConfigError, NonFiniteError
from vola.system import System, TrainConfig
from vola.train import loop, optim
from vola.train.loop import Schedule, acting, held_out_loss, train
from vola.train.optim import Average, learning_rate, make_optimiser
from vola.train.throughput import peak_flops, step_flops
from vola.variants import HEADS

QUIET = Schedule(log=1, validate=0, save=2, keep=99, progress="none")


def small_run(run: Path, made: System, schedule: Schedule = QUIET, resume: bool = False, data=None):
    return train(run, made, fitted(made, data), windows(made, data), windows(made, data), None, schedule, resume)


def weights(run: Path) -> dict[str, torch.Tensor]:
    folder = checkpoint.find(run)
    acting_weights = {f"acting/{k}": v for k, v in load_file(folder / "policy.safetensors").items()}
    return acting_weights | load_file(folder / "training.safetensors")


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def losses(run: Path) -> list[tuple[int, float, float]]:
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [(r["step"], r["loss"], r["lr"]) for r in rows if r["kind"] == "train"]


@pytest.mark.parametrize("name", ["pi0", "regression", *HEADS])
def test_every_system_trains_saves_resumes_and_plans(name: str, tmp_path: Path) -> None:
    made = system(name, train__steps=6)
    whole = small_run(tmp_path / "whole", made)
    small_run(tmp_path / "cut", made.override({"train.steps": 6}), replace(QUIET, save=2))
    for folder in checkpoint.complete(tmp_path / "cut")[1:]:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    small_run(tmp_path / "cut", made, resume=True)
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")
    loaded = checkpoint.load(tmp_path / "whole")
    observation = windows(made).batch([0, 1]).observation
    generators = [np.random.default_rng(b) for b in range(2)]
    again = [np.random.default_rng(b) for b in range(2)]
    np.testing.assert_array_equal(
        loaded.policy.plan(observation, generators).actions, whole.policy.plan(observation, again).actions
    )


def fork_run(run: Path, made: System) -> int:
    """Train in a forked process (no second start of the interpreter) and return its process id."""
    child = os.fork()
    if child == 0:
        try:
            small_run(run, made, resume=True)
        finally:
            os._exit(0)
    return child


def test_kill_9_at_any_moment_then_resume_is_bit_exact(tmp_path: Path) -> None:
    made = system(train__steps=60)
    small_run(tmp_path / "whole", made)
    run, rng, kills = tmp_path / "killed", np.random.default_rng(0), 0
    for _ in range(4):
        before = len(checkpoint.complete(run))
        child = fork_run(run, made)
        # Wait until this process has saved something of its own, then a little longer: inside a step, or a save.
        deadline = time.monotonic() + 20
        while len(checkpoint.complete(run)) <= before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(float(rng.uniform(0, 0.05)))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        kills += os.WIFSIGNALED(status)
    assert kills >= 3
    assert 0 < len(checkpoint.complete(run)) < 30
    small_run(run, made, resume=True)
    assert_same(weights(tmp_path / "whole"), weights(run))
    assert losses(tmp_path / "whole") == losses(run)


def test_ctrl_c_saves_and_resume_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = system(train__steps=8)
    whole = small_run(tmp_path / "whole", made)
    assert not whole.interrupted
    original, calls = loop._step, []

    def step(*args: object) -> dict[str, float]:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(loop, "_step", step)
    handler = signal.getsignal(signal.SIGINT)
    result = small_run(tmp_path / "cut", made, replace(QUIET, save=0))
    assert result.interrupted
    assert result.step == 3
    assert signal.getsignal(signal.SIGINT) is handler
    small_run(tmp_path / "cut", made, resume=True)
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


@pytest.mark.parametrize("damage", ["{}", "[]", "half a li"])
def test_a_damaged_log_is_named_and_costs_nothing(damage: str, tmp_path: Path) -> None:
    made = system()
    small_run(tmp_path, made)
    before, log = weights(tmp_path), tmp_path / "log.jsonl"
    whole = log.read_text()
    log.write_text(damage + "\n" + whole)
    with pytest.raises(CheckpointError, match="line 1 is not a training record.*Delete it"):
        small_run(tmp_path, made.override({"train.steps": 4}), resume=True)
    assert_same(before, weights(tmp_path))
    log.write_text(whole + damage)  # a half-written last line is what kill -9 leaves behind
    assert small_run(tmp_path, made.override({"train.steps": 4}), resume=True).step == 4


def test_ctrl_c_during_an_evaluation_saves_too(tmp_path: Path) -> None:
    made = system(train__steps=9)

    def evaluate(p: object, step: int) -> list[dict[str, object]]:
        os.kill(os.getpid(), signal.SIGINT)
        return []

    schedule = replace(QUIET, save=0, evaluate=4)
    result = train(tmp_path, made, fitted(made), windows(made), None, evaluate, schedule)
    assert result.interrupted
    assert checkpoint.load(tmp_path).step == 4
    with pytest.raises(CheckpointError, match="4 steps are done"):
        small_run(tmp_path, made.override({"train.steps": 3}), resume=True)


def test_a_failing_evaluation_costs_no_training(tmp_path: Path) -> None:
    made = system(train__steps=4)

    def fails(p: object, step: int) -> list[dict[str, object]]:
        raise RuntimeError("simulator gone")

    with pytest.raises(RuntimeError, match="simulator gone"):
        train(tmp_path, made, fitted(made), windows(made), None, fails, replace(QUIET, save=0))
    assert checkpoint.load(tmp_path).step == 4


def test_a_resumed_run_counts_all_its_time(tmp_path: Path) -> None:
    made = system(train__steps=4)
    small_run(tmp_path, made)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    before = max(row["seconds"] for row in rows if row["kind"] == "train")
    again = small_run(tmp_path, made.override({"train.steps": 6}), resume=True)
    assert again.seconds > before > 0
    assert again.seconds_now < again.seconds
    assert again.samples_per_second == pytest.approx(6 * 4 / again.seconds, rel=0.2)


def test_progress_lines_go_to_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_run(tmp_path, system(train__steps=4), replace(QUIET, progress="lines", validate=2))
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(",")[0] for line in err.splitlines()] == ["pi0: step 2 of 4", "pi0: step 4 of 4"]


def test_disk_full_while_saving_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = system(train__steps=2)
    small_run(tmp_path, made)
    before = weights(tmp_path)
    written = []

    def full(tensors: object, path: Path) -> None:
        written.append(path)
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left.*Intact checkpoints: \['00000002'\].*--resume"):
        small_run(tmp_path, made.override({"train.steps": 4}), resume=True)
    assert written
    assert not list((tmp_path / "checkpoints").glob(".*"))
    monkeypatch.undo()
    assert_same(before, weights(tmp_path))
    small_run(tmp_path, made.override({"train.steps": 4}), resume=True)


def test_a_run_folder_is_never_overwritten(tmp_path: Path) -> None:
    made = system()
    small_run(tmp_path, made)
    with pytest.raises(CheckpointError, match="already holds a run"):
        small_run(tmp_path, made)


def test_resume_with_another_dataset_or_system_is_refused(tmp_path: Path) -> None:
    made = system()
    small_run(tmp_path, made)
    before = weights(tmp_path)
    with pytest.raises(CheckpointError, match="was trained on dataset"):
        small_run(tmp_path, made.override({"train.steps": 4}), resume=True, data=dataset(seed=5))
    with pytest.raises(CheckpointError, match=r"lr = 1.0. Only train.steps may change"):
        small_run(tmp_path, made.override({"train.lr": 1.0}), resume=True)
    assert_same(before, weights(tmp_path))


@pytest.mark.parametrize("fault", ["missing", "extra", "mis-shaped"])
def test_M10_wrong_weights_are_refused_and_nothing_is_loaded(fault: str) -> None:
    p = policy(system())
    good = {k: v.clone() for k, v in p.state_dict().items()}
    bad = dict(good)
    if fault == "missing":
        del bad["head.network.leave.weight"]
    elif fault == "extra":
        bad["head.network.extra"] = torch.zeros(2)
    else:
        bad["head.network.leave.weight"] = torch.zeros(1, 1)
    bad["backbone.state.bias"] = bad["backbone.state.bias"] + 1
    with pytest.raises(CheckpointError, match=fault.replace("mis-shaped", "expected shape")):
        checkpoint.load_weights(p, bad, "file")
    assert_same(good, dict(p.state_dict()))


def test_N09_a_checkpoint_without_statistics_or_with_altered_files_is_refused(tmp_path: Path) -> None:
    small_run(tmp_path, system())
    folder = checkpoint.find(tmp_path)
    text = (folder / "fitted.json").read_text()
    (folder / "fitted.json").write_text(text.replace('"mean"', '"men"', 1))
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        checkpoint.load(tmp_path)
    (folder / "fitted.json").unlink()
    with pytest.raises(CheckpointError, match="fitted.json is missing"):
        checkpoint.load(tmp_path)
    with pytest.raises(CheckpointError, match="expected a checkpoint folder or a run"):
        checkpoint.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("system.json", '"H": 4', '"H": "x"'),
        ("system.json", '"T": 1', '"T": 1.5'),
        ("system.json", '"System"', "[1]"),
        ("fitted.json", '"instructions": [', '"instructions": 5, "x": ['),
        ("fitted.json", '"pixels": {', '"pixels": 3, "x": {'),
    ],
)  # fmt: skip
def test_a_checkpoint_edited_by_hand_is_refused_with_a_sentence(file: str, old: str, new: str, tmp_path: Path) -> None:
    small_run(tmp_path, system())
    folder = checkpoint.find(tmp_path)
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][file] = checkpoint._sha256(folder / file)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises((CheckpointError, ConfigError), match="expected|understood"):
        checkpoint.load(tmp_path)
    (folder / "manifest.json").write_text("")
    with pytest.raises(CheckpointError, match="expected JSON"):
        checkpoint.load(tmp_path)


def test_fingerprint_changes_when_weights_change(tmp_path: Path) -> None:
    small_run(tmp_path / "a", system())
    small_run(tmp_path / "b", system(train__seed=1))
    small_run(tmp_path / "c", system())
    marks = [checkpoint.load(tmp_path / n).manifest["fingerprint"] for n in "abc"]
    assert marks[0] == marks[2] != marks[1]


def test_checkpoints_hold_no_pickle(tmp_path: Path) -> None:
    small_run(tmp_path, system())
    assert {f.suffix for f in checkpoint.find(tmp_path).iterdir()} == {".json", ".safetensors"}


def test_R01_evaluation_restores_mode_and_weights_also_on_errors() -> None:
    p = policy(system())
    average = Average(p, 0.9)
    with torch.no_grad():
        for q in p.parameters():
            q.add_(1)
    live = {k: v.clone() for k, v in p.state_dict().items()}
    for mode in (True, False):
        p.train(mode)
        with acting(p, average, 0.9):
            assert not p.training
            assert_same(dict(average.weights), dict(p.state_dict()))
        assert p.training is mode
        with pytest.raises(ZeroDivisionError), acting(p, average, 0.9):
            raise ZeroDivisionError
        assert p.training is mode
        assert_same(live, dict(p.state_dict()))


def test_R03_held_out_loss_uses_fixed_noise_and_only_valid_steps() -> None:
    made = system()
    p, w = policy(made), windows(made)
    one, two = held_out_loss(p, w), held_out_loss(p, w)
    assert one == two
    assert len(one["loss_per_step"]) == made.H
    assert len(one["loss_per_dimension"]) == 2
    assert np.isclose(np.mean(one["loss_per_dimension"]), one["loss"])


def test_R06_learning_rate_counts_optimiser_steps() -> None:
    config = TrainConfig(steps=100, warmup=10, lr=1.0, final=0.1)
    curve = [learning_rate(s, config) for s in range(100)]
    assert curve[0] == pytest.approx(0.1)
    assert curve[9] == 1.0
    assert np.argmax(curve) in (9, 10)
    assert learning_rate(100, config) == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(curve[10:], curve[11:], strict=False))
    assert curve == [learning_rate(s, replace(config, accumulate=4, batch=7)) for s in range(100)]


def test_accumulation_is_one_larger_batch(tmp_path: Path) -> None:
    """Same samples in the same order: 2 x 4 accumulated equals 1 x 8 for a head without noise."""
    one = system("regression", train__batch=8, train__ema=0.0)
    two = system("regression", train__batch=4, train__accumulate=2, train__ema=0.0)
    data = dataset(lengths=(8, 8, 8, 8))
    # H = 1 makes every step valid, so that the mean over the two halves is the mean over the whole.
    one, two = one.override({"H": 1, "execute.k": 1}), two.override({"H": 1, "execute.k": 1})
    small_run(tmp_path / "one", one, data=data)
    small_run(tmp_path / "two", two, data=data)
    for (name, a), b in zip(weights(tmp_path / "one").items(), weights(tmp_path / "two").values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4, msg=name)


def test_R08_training_stops_at_the_first_bad_number_and_names_it(tmp_path: Path) -> None:
    made = system(train__steps=50)
    data = dataset()
    fit_before = fitted(made, data)
    data.columns["state"][2][5, 0] = np.nan
    with pytest.raises(NonFiniteError, match="episode 2, frame 5"):
        train(tmp_path, made, fit_before, windows(made, data), None, None, QUIET)


def test_R08_an_exploding_loss_names_the_batch_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    made = system(train__steps=40, train__lr=1e30, train__clip=1e30, train__warmup=0)
    with pytest.raises(NonFiniteError, match=r"became .* at step \d+.*episode:frame"):
        small_run(tmp_path, made, replace(QUIET, save=1))
    for folder in checkpoint.complete(tmp_path):
        state = checkpoint.load_training(folder)
        assert state.step >= 1


def test_weight_decay_spares_norms_biases_and_embeddings() -> None:
    p = policy(system())
    groups = make_optimiser(p, TrainConfig(weight_decay=0.5)).param_groups
    free = {id(q) for q in groups[1]["params"]}
    names = {n for n, q in p.named_parameters() if id(q) in free}
    assert "backbone.language.embedding.weight" in names
    assert any(n.endswith("bias") for n in names)
    assert not any(n.endswith("qkv.weight") for n in names)
    assert groups[1]["weight_decay"] == 0.0


def test_average_follows_its_formula() -> None:
    p = policy(system())
    name = "backbone.state.bias"
    average, expected = Average(p, 0.9), p.state_dict()[name].clone()
    for step in range(30):
        with torch.no_grad():
            p.backbone.state.bias.add_(1)
        average.update(p, step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * p.state_dict()[name]
    torch.testing.assert_close(average.weights[name], expected)


def test_bf16_autocast_trains(tmp_path: Path) -> None:
    result = small_run(tmp_path, system(train__precision="bf16"))
    assert all(torch.isfinite(q).all() for q in result.policy.parameters())


def test_evaluation_records_reach_the_log(tmp_path: Path) -> None:
    made = system(train__steps=4)
    seen = []

    def evaluate(p: object, step: int) -> list[dict[str, object]]:
        seen.append(step)
        return [{"policy": "pi0", "successes": 1, "episodes": 2}]

    train(tmp_path, made, fitted(made), windows(made), None, evaluate, replace(QUIET, evaluate=2))
    assert seen == [2, 4]
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if r["kind"] == "eval"] == [2, 4]


def test_R05_every_window_is_seen_equally_often() -> None:
    """One dataset, so the only weight is the number of frames: each sample once an epoch."""
    seen = np.concatenate([batch_indices(27, 4, 0, step) for step in range(27)])
    np.testing.assert_array_equal(np.bincount(seen, minlength=27), np.full(27, 4))


def test_optimiser_moments_of_other_weights_are_refused() -> None:
    p = policy(system())
    with pytest.raises(CheckpointError, match="moments of every weight"):
        optim.restore_optimiser(p, make_optimiser(p, TrainConfig()), {"exp_avg/nothing": torch.zeros(1)})


def test_no_window_is_refused(tmp_path: Path) -> None:
    class Nothing:
        def __len__(self) -> int:
            return 0

    made = system()
    with pytest.raises(ConfigError, match="at least one training window"):
        train(tmp_path, made, fitted(made), Nothing(), None, None, QUIET)


def test_flops_are_counted_and_bounded() -> None:
    made = system()
    p, w = policy(made), windows(made)
    one, two = step_flops(p, w.batch([0, 1])), step_flops(p, w.batch([0, 1, 2, 3]))
    assert two == 2 * one > 0
    assert peak_flops(0.02, 64) > 1e6
