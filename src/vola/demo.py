"""``vola demo``: the whole path on the built-in bimodal task, and beside it the baseline that must fail.

Two processes with one thread each train pi0 and L2 regression at the same time, on the same demonstrations and with the
same budget (one process with two threads would be slower than two with one).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from vola import checkpoint
from vola.envs.tabletop import make_tabletop
from vola.errors import ConfigError, VolaError
from vola.report.page import build_report
from vola.rollout.samples import fan, save_samples
from vola.workflow import EVALUATION_SEED, closed_loop, collect, console, expert_loop

TASK = "vola/Detour-v0"
CLAIM = (
    "Half of the demonstrations pass the wall on the left, half on the right. A head that predicts one answer "
    "averages them and, wherever both ways are open, drives into the wall; a head that samples picks a side."
)
FANS = 3
# Training windows start where a policy that executes k = 4 steps looks. With windows from every frame, regression
# learns from the frames right after the choice to lean to the side it already drifts to, and often gets through.
STRIDE = 4


class DemoError(VolaError):
    """A training process of the demo ended with an error; its output is in the named file."""


def demo(out: Path, episodes: int = 3000, steps: int = 4000, eval_episodes: int = 200) -> Path:
    """Record demonstrations, train both, evaluate both and the expert, write ``out/report.html``; returns it.

    Raises:
        ConfigError: ``out`` already holds something. DemoError: a training process failed.
    """
    begun = time.perf_counter()
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty. Remove it (rm -r {out}) or choose another folder with --out.")
    collect(TASK, out / "data", episodes)
    _train_side_by_side(out, steps, eval_episodes)
    summary = _merge(out, begun)
    page = build_report(out)
    for p in summary["policies"]:
        low, high = p["interval"]
        share = p["successes"] / p["episodes"]
        console.print(f"{p['name']:>12}  {share:6.1%}  [{low:.1%}, {high:.1%}]  of {p['episodes']} start states")
    console.print(f"{summary['minutes']:.1f} minutes. Open {page}")
    return page


def _train_side_by_side(out: Path, steps: int, eval_episodes: int) -> None:
    """Both trainings as child processes; their logs drive two progress bars. Ctrl-C reaches both and saves both."""
    runs = {"pi0": out / "pi0", "regression": out / "regression"}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "MKL_NUM_THREADS": "1"}
    children: dict[str, subprocess.Popen[bytes]] = {}
    outputs: dict[str, Path] = {}
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    for name, run in runs.items():
        arguments = [
            *(sys.executable, "-m", "vola", "train", str(out / "data"), "--system", name, "--env", TASK),
            *("--out", str(run), "--val", "0.05", "--eval-episodes", str(eval_episodes), "--no-report"),
            *("--evaluate-every", "500", "--set", f"train.steps={steps}", f"train.stride={STRIDE}"),
        ]
        outputs[name] = out / f"{name}.log"
        with outputs[name].open("wb") as sink:
            children[name] = subprocess.Popen(arguments, stdout=sink, stderr=sink, env=environment)
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        tasks = {name: bar.add_task(name, total=steps, note="starting") for name in runs}
        try:
            while any(child.poll() is None for child in children.values()):
                for name, run in runs.items():
                    _follow(bar, tasks[name], run / "log.jsonl")
                time.sleep(0.5)
        except KeyboardInterrupt:
            for child in children.values():
                child.send_signal(signal.SIGINT)
            for child in children.values():
                child.wait()
            raise
    for name, child in children.items():
        if child.returncode != 0:
            tail = outputs[name].read_text(errors="replace").strip().splitlines()[-4:]
            raise DemoError(
                f"training {name} ended with status {child.returncode}; see {outputs[name]}:\n" + "\n".join(tail)
            )


def _follow(bar: Progress, task: TaskID, log: Path) -> None:
    if not log.exists():
        return
    lines = log.read_bytes()[-4000:].split(b"\n")[1:-1]
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    steps = [r for r in records if r["kind"] == "train"]
    success = [r for r in records if r["kind"] == "eval"]
    if steps:
        note = f"loss {steps[-1]['loss']:.3f}  {steps[-1]['samples_per_second']:.0f} samples/s"
        if success:
            note += f"  success {success[-1]['successes'] / success[-1]['episodes']:.0%}"
        bar.update(task, completed=steps[-1]["step"], note=note)


def _merge(out: Path, begun: float) -> dict[str, Any]:
    """One run folder out of the two: pi0 is the run, regression its baseline, and the expert the ceiling."""
    loaded = {name: checkpoint.load(out / name) for name in ("pi0", "regression")}
    filmed = {n: closed_loop(c.policy, TASK, c.system, episodes=3, film=range(3)) for n, c in loaded.items()}
    expert = expert_loop(TASK, episodes=3, film=range(3))
    fans = [
        {n: fan(c.policy, make_tabletop(TASK), EVALUATION_SEED + i) for n, c in loaded.items()} for i in range(FANS)
    ]
    save_samples(out / "samples.safetensors", [*filmed.values(), expert], fans)
    rows = pq.read_table(out / "pi0" / "rollouts.parquet").to_pylist()
    other_rows = pq.read_table(out / "regression" / "rollouts.parquet").to_pylist()
    rows += [row | {"role": "baseline"} for row in other_rows if row["policy"] == "regression"]
    pq.write_table(pa.Table.from_pylist(rows), out / "rollouts.parquet")
    summary: dict[str, Any] = json.loads((out / "pi0" / "summary.json").read_text())
    other: dict[str, Any] = json.loads((out / "regression" / "summary.json").read_text())
    policy, baseline = summary["policies"][0], other["policies"][0] | {"role": "baseline"}
    summary |= {
        "name": out.name,
        "policies": [policy, baseline, *summary["policies"][1:]],
        "headline": {"claim": CLAIM},
        "success": policy["successes"] / policy["episodes"],
        "interval": policy["interval"],
        "episodes": policy["episodes"],
        "baseline": baseline["successes"] / baseline["episodes"],
        "minutes": (time.perf_counter() - begun) / 60,
        "command": ["vola", "demo", "--out", str(out)],
    }
    summary["seeds"]["demonstrations"] = f"0 ... {summary['dataset']['episodes'] // 2 - 1}, each on both sides"
    record: dict[str, Any] = json.loads((out / "pi0" / "heldout.json").read_text())
    beside: dict[str, Any] = json.loads((out / "regression" / "heldout.json").read_text())
    record["baselines"] = {"regression": beside["policy"], **record["baselines"]}
    record["explain"] = {"regression": "trained on the same demonstrations"}
    (out / "heldout.json").write_text(json.dumps(record))
    (out / "summary.json").write_text(json.dumps(summary, indent=2))
    (out / "log.jsonl").write_bytes((out / "pi0" / "log.jsonl").read_bytes())
    (out / "baseline").mkdir(exist_ok=True)
    (out / "baseline" / "log.jsonl").write_bytes((out / "regression" / "log.jsonl").read_bytes())
    return summary
