"""The command ``vola``: parse, call a function of ``workflow``, print. Heavy imports wait until they are needed.

Exit status: 0 done, 1 an error that vola explains, 2 not understood, 130 stopped by Ctrl-C (with everything saved).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from vola.errors import ConfigError, VolaError

Overrides = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=VALUE ...")]


def demo(out: Path = Path("runs/demo"), episodes: int = 3000, steps: int = 4000, eval_episodes: int = 200) -> None:
    """Demonstrations -> pi0 and an L2 baseline -> closed-loop success -> a report, on the built-in bimodal task.

    Args:
        out: run folder to create.
        episodes: demonstrations to record, each scene once per side of the wall.
        steps: training steps of each of the two policies.
        eval_episodes: held-out start states for the final success rates.
    """
    from vola.demo import demo as run

    run(out, episodes, steps, eval_episodes)


@dataclass(frozen=True)
class TrainOptions:
    """How to train."""

    system: str = "pi0"
    """Which system file: pi0 or regression."""
    size: Literal["tiny", "small"] = "small"
    """Which of its sizes."""
    head: str | None = None
    """Another action head on its backbone, e.g. l2, bins, fast, cvae, diffusion, flow (all: `vola show heads`)."""
    out: Path | None = None
    """Run folder; default runs/<system>-<data>."""
    val: float = 0.1
    """Share of episodes held out from training and statistics."""
    env: str | None = None
    """Task for closed-loop evaluation; default the task given as data, none for a dataset."""
    episodes: int = 3000
    """Demonstrations to record when data is a task."""
    eval_episodes: int = 200
    """Start states of the final closed-loop evaluation."""
    evaluate_every: int = 0
    """Also evaluate (50 start states) every so many steps; 0 is only at the end."""
    relative: bool = False
    """Learn actions as offsets from the current state where both share a name."""
    instruction: str | None = None
    """Sentence for a dataset that has none, or instead of its own."""
    missing_video: Literal["skip", "blind", "refuse"] = "skip"
    """Episodes whose video is absent: leave out, use their numbers without pictures, or refuse."""
    dagger: int = 0
    """Rounds in which the policy drives in the task and the expert says what it would have done. The training steps
    are shared out evenly over the parts before, between and after the rounds."""
    dagger_episodes: int = 300
    """Episodes per such round."""
    set: Overrides = ()
    """Settings to override, e.g. --set H=32 train.steps=500 head.steps=5 (see `vola show pi0`)."""
    resume: bool = False
    """Continue the run in `out`."""
    report: bool = True
    """Write report.html at the end."""


def train(data: Positional[str], options: tyro.conf.OmitArgPrefixes[TrainOptions] = TrainOptions()) -> None:  # noqa: B008
    """Train a policy on a LeRobot dataset or a built-in task, evaluate it and write a report.

    Args:
        data: folder of a LeRobot dataset (v3.0 or v2.1), or a built-in task such as vola/Detour-v0.
        options: how.
    """
    from vola.train.loop import Schedule
    from vola.workflow import train_run

    given = {f.name: getattr(options, f.name) for f in fields(options)}
    out, changes = given.pop("out"), parse_overrides(given.pop("set"))
    name = options.system if options.head is None else f"{options.system}-{options.head}"
    progress: Literal["bar", "lines"] = "bar" if sys.stderr.isatty() else "lines"
    run = train_run(
        data,
        out or Path("runs") / f"{name}-{Path(data).name}",
        changes=changes,
        schedule=Schedule(evaluate=given.pop("evaluate_every"), progress=progress),
        command=["vola", *sys.argv[1:]],
        **given,
    )
    _print_summary(run)


def evaluate(
    checkpoint: Positional[Path],
    env: str | None = None,
    episodes: int = 200,
    k: int | None = None,
    noise: float = 0.0,
    kicks: float = 0.0,
    delay: int = 0,
    set: Overrides = (),
) -> None:
    """Closed-loop success of a checkpoint, with its interval, on fixed held-out start states.

    Args:
        checkpoint: checkpoint folder, or a run (its newest checkpoint).
        env: built-in task; default the one that the run was evaluated in.
        episodes: number of start states; always the same ones.
        k: executed steps per chunk: short for --set execute.k=.
        noise: execution noise, standard deviation as a share of the robot's speed.
        kicks: chance per step of a shove in a random direction.
        delay: ticks that a plan really takes while the robot goes on with what it has (execute.delay of RealTime is
            what it expects).
        set: how the trained policy samples and acts, e.g. --set head.steps=1 execute=Ensemble execute.m=0.1.
    """
    from vola import checkpoint as checkpoints
    from vola.report import evaluations, words
    from vola.report.counts import count
    from vola.rollout.latency import Latency
    from vola.summary import evaluation_of, run_of
    from vola.theory.statistics import wilson
    from vola.workflow import closed_loop, console

    if episodes < 1:
        raise ConfigError(f"--episodes: expected at least 1 start state, got {episodes}")
    loaded = checkpoints.load(checkpoint)
    env = env or _task_of(loaded.folder)
    changes = parse_overrides(set)
    loaded = checkpoints.with_changes(loaded, changes | ({} if k is None else {"execute.k": k}))
    system, latency = loaded.system, Latency(delay) if delay else None
    scenes = {"noise": noise} | ({"kick_probability": kicks} if kicks else {})
    rollouts = closed_loop(loaded.policy, env, system, episodes=episodes, settings=scenes, latency=latency)
    made = evaluation_of(loaded, rollouts, scenes, changes, latency, ["vola", *sys.argv[1:]])
    if made["unknown_words"]:
        console.print(f"[yellow]note:[/] words that training never saw: {', '.join(made['unknown_words'])}")
    for sentence in words.decode_sentences(system.name, rollouts.rate, count(rollouts.episodes, made["on_malformed"])):
        console.print(f"[yellow]note:[/] {sentence}")
    interval = wilson(rollouts.rate.successes, rollouts.rate.n)
    counts = ", ".join(f"{n} {kind}" for kind, n in sorted(made["failures"].items())) or "none"
    print(
        f"{system.name} on {env}, {words.conditions(made)}: {rollouts.rate.successes} of {episodes} = "
        f"{rollouts.rate.rate:.1%} [{interval.low:.1%}, {interval.high:.1%}] (95 % Wilson); failures: {counts}"
    )
    run = run_of(loaded)
    if run is None:
        console.print(f"[yellow]note:[/] {loaded.folder} lies in no run folder, so this evaluation left no record")
    else:
        console.print(f"recorded in {evaluations.append(run, made)}")


def _task_of(checkpoint: Path) -> str:
    """The task that the run of a checkpoint was evaluated in."""
    from vola.report.records import read_summary

    run = checkpoint.resolve().parents[1]
    task = read_summary(run).env if (run / "summary.json").exists() else None
    if task is None:
        raise ConfigError(f"{checkpoint}: its run names no task; say which with --env, e.g. --env vola/Detour-v0")
    return str(task)


def lab(
    name: Positional[str] = "",
    out: Path = Path("runs/lab"),
    pages: Path | None = None,
    seeds: int = 3,
    episodes: int = 200,
    scale: float = 1.0,
    size: Literal["tiny", "small"] = "small",
    processes: int = 2,
) -> None:
    """Run an experiment: train what it needs, measure, write a page with tables, plots and the verdict on its claim.

    Without a name it lists the experiments. Interrupted, the same command goes on.

    Args:
        name: modes, chunks, precision, compose, latency or heads.
        out: folder for demonstrations, trained policies and answers, shared by all experiments.
        pages: folder for the page; default <out>/pages.
        seeds: training seeds.
        episodes: held-out start states per question.
        scale: factor of training steps and demonstrations, for a trial run.
        size: size of the system.
        processes: trainings side by side, one thread each.
    """
    from vola.lab.findings import Plan
    from vola.lab.ledger import listing, run_lab

    if not name:
        print(listing())
        return
    folder = pages or out / "pages"
    command = "vola " + " ".join(sys.argv[1:])
    finding = run_lab(name, Plan(seeds, episodes, scale, size), out, folder, command, processes)
    print(f"{finding.claim}: {finding.verdict}. {finding.sentence}\n{folder / name}.md")


def report(run: Positional[Path]) -> None:
    """Write (again) the report of a run folder from its records.

    Args:
        run: folder with summary.json.
    """
    from vola.report.page import build_report

    print(build_report(run))


def show(what: Positional[str], size: Literal["tiny", "small"] = "small", head: str | None = None) -> None:
    """Print what a checkpoint or a system is made of: parts, layout, parameters, cost and floor of the head.

    Args:
        what: a checkpoint folder, a run, the name of a system, or "heads" for a table of all heads.
        size: which size of a named system.
        head: another head on a named system.
    """
    from vola.show import show as text

    print(text(what, size, head))


def data_info(path: Positional[Path], missing_video: Literal["skip", "blind", "refuse"] = "skip") -> None:
    """Describe a LeRobot dataset: episodes, rates, dimensions with units and ranges, cameras, tasks, oddities.

    Args:
        path: folder of the dataset.
        missing_video: episodes whose video is absent: leave them out, use their numbers without pictures, or refuse.
    """
    from rich.console import Console

    from vola.data.lerobot import open_lerobot
    from vola.data.summary import describe

    Console().print(describe(open_lerobot(path, missing_video=missing_video)))


def data_collect(
    env: Positional[str],
    out: Path,
    episodes: int = 3000,
    first_seed: int = 0,
    noise: float = 0.15,
    sides: Literal["both", "left", "right", "near"] = "both",
    video: bool = False,
) -> None:
    """Record expert demonstrations of a built-in task as a LeRobot v3.0 dataset.

    Args:
        env: built-in task, e.g. vola/Detour-v0, vola/Push-v0, vola/Compose-v0.
        out: new folder.
        episodes: how many (an even number where each scene is shown once per side).
        first_seed: seed of the first scene.
        noise: execution noise, standard deviation as a share of the robot's speed.
        sides: for Detour: both sides of every scene, or one only.
        video: store h264 video instead of PNG.
    """
    from vola.workflow import collect

    written = collect(env, out, episodes, first_seed=first_seed, noise=noise, sides=sides, video=video)
    print(f"{written} episodes in {out}")


def data_tokens(
    path: Positional[Path],
    H: int = 16,
    kinds: tuple[str, ...] = (),
    relative: bool = False,
    val: float = 0.2,
    missing_video: Literal["skip", "blind", "refuse"] = "blind",
) -> None:
    """Compare action tokenizers on a LeRobot dataset: error in physical units, tokens and bits per chunk, clipping.

    Args:
        path: folder of the dataset.
        H: chunk length in steps.
        kinds: which, e.g. midpoint:256 truncated:256 edges:256 quantile:64 fast:10 fast-wide:10 (bins, or FAST scale).
        relative: tokenize actions as offsets from the current state where both share a name.
        val: share of episodes held out; all figures are measured on them.
        missing_video: episodes whose video is absent: leave out, use their numbers, or refuse.
    """
    from rich.console import Console
    from rich.progress import Progress

    from vola.data.lerobot import open_lerobot
    from vola.data.tokens import KINDS, describe_tokens, measure
    from vola.data.transforms import RelativeActions, Transforms

    dataset = open_lerobot(path, missing_video=missing_video)
    transforms = Transforms((RelativeActions.by_name(dataset.spec),)) if relative else Transforms()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        found = measure(dataset, H, kinds or KINDS, transforms, val, progress=progress)
    Console().print(describe_tokens(found))


def parse_overrides(pairs: Sequence[str]) -> dict[str, Any]:
    """``["H=32", "head.time=beta"]`` -> a dictionary; values are JSON where they parse as such, else text.

    Raises:
        ConfigError: an entry without "=".
    """
    changes: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise ConfigError(f"--set: expected NAME=VALUE, e.g. train.steps=500, got {pair!r}")
        try:
            changes[name] = json.loads(value)
        except ValueError:
            changes[name] = value
    return changes


def _print_summary(run: Path) -> None:
    summary_file = run / "summary.json"
    if not summary_file.exists():
        return
    summary = json.loads(summary_file.read_text())
    for p in summary["policies"]:
        low, high = p["interval"]
        share = p["successes"] / p["episodes"]
        print(f"{p['name']:>12}  {share:6.1%}  [{low:.1%}, {high:.1%}]  of {p['episodes']} start states")
    if (run / "heldout.json").exists():
        import numpy as np

        from vola.report.heldout import read_heldout
        from vola.report.words import heldout_lines

        found = read_heldout(run)
        if found is not None:
            print("\n".join(heldout_lines(summary["system"], found, np.random.default_rng(0))))
    print(f"{summary['minutes']:.1f} minutes, {summary['samples_per_second']:.0f} samples/s; records in {run}")


DESCRIPTION = "Robot demonstrations in, a measured vision-language-action policy out."
COMMANDS: dict[str, Any] = {
    "demo": demo,
    "train": train,
    "eval": evaluate,
    "report": report,
    "show": show,
    "lab": lab,
    "data": {"info": data_info, "collect": data_collect, "tokens": data_tokens},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command."""
    rest = list(sys.argv[1:] if arguments is None else arguments)
    command, program = COMMANDS, "vola"
    while isinstance(command, dict):
        name = _choose(program, command, rest[:1])
        command, program, rest = command[name], f"{program} {name}", rest[1:]
    try:
        if rest.count("--set") > 1:  # the parser would keep the last one and drop the others without a word
            raise ConfigError(
                "--set: expected once, with all settings behind it (--set H=32 train.steps=500), got more"
            )
        tyro.cli(command, prog=program, args=rest)
    except VolaError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except OSError as error:  # no such folder, no permission, disk full: the system's own sentence names the path
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _choose(program: str, commands: Mapping[str, Any], argument: Sequence[str]) -> str:
    """Which command is meant; prints the list of commands for --help or for none."""
    parser = argparse.ArgumentParser(prog=program, description=DESCRIPTION)
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in commands.items():
        text = (
            f"{' | '.join(command)} (see `{program} {name} --help`)" if isinstance(command, dict) else command.__doc__
        )
        choices.add_parser(name, help=text.strip().partition("\n")[0], add_help=False)
    return str(parser.parse_args(argument or ["--help"]).command)


if __name__ == "__main__":
    main()
