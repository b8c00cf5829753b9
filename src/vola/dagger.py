"""DAgger in training: the policy drives, the expert says what it would have done there, and both train on (Ross et al.
2011, algorithm 3.1).

The steps of the run are shared out evenly: a first part on the demonstrations, then after every round a part on the
demonstrations and everything collected so far. Statistics and vocabularies stay those of the demonstrations, so that
nothing the policy has learnt changes its meaning.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vola.data.joined import JoinedDataset
from vola.data.lerobot import open_lerobot
from vola.data.lerobot_write import LeRobotWriter
from vola.data.windows import Windows
from vola.envs.tabletop import make_tabletop
from vola.errors import ConfigError, expect_positive
from vola.policy import Policy
from vola.rollout.dagger import relabel
from vola.summary import Prepared
from vola.train.loop import Evaluate, Result, Schedule, train

# The policy is visited in scenes of its own, neither demonstrated nor evaluated.
DAGGER_SEED = 2_000_000


@dataclass(frozen=True)
class Dagger:
    """``rounds`` of collecting ``episodes`` scenes each in the built-in task ``env``.

    beta: probability per step that the expert drives in round 1; it falls to beta^r in round r (algorithm 3.1). 0:
        the policy drives alone.
    """

    env: str
    rounds: int
    episodes: int = 300
    beta: float = 0.0
    noise: float = 0.15

    def __post_init__(self) -> None:
        expect_positive("dagger", rounds=self.rounds, episodes=self.episodes)


def train_with_dagger(
    out: Path,
    ready: Prepared,
    dagger: Dagger,
    evaluate: Evaluate | None = None,
    schedule: Schedule | None = None,
    resume: bool = False,
) -> Result:
    """Train in ``dagger.rounds`` + 1 parts; each round's episodes are kept as a dataset in ``out/dagger``.

    A run that stops anywhere goes on with ``resume``: rounds that are there are not collected again.

    Raises:
        CheckpointError, NonFiniteError: see ``train.loop.train``. ConfigError: unknown task.
    """
    schedule, system = schedule or Schedule(), ready.system
    parts = dagger.rounds + 1
    if system.train.steps < parts:
        raise ConfigError(f"dagger: expected at least one training step per part ({parts}), got {system.train.steps}")
    for r in range(parts):
        until = round(system.train.steps * (r + 1) / parts)
        data = ready.train if r == 0 else _aggregate(ready, [out / "dagger" / str(i + 1) for i in range(r)])
        part = replace(schedule, until=until)
        result = train(out, system, ready.fitted, data, ready.val, evaluate, part, resume or r > 0)
        if result.interrupted or r == dagger.rounds:
            return result
        print(
            round_sentence(r + 1, collect_round(out / "dagger", result.policy, ready, dagger, r + 1)), file=sys.stderr
        )
    raise AssertionError("the last part returns")


def collect_round(folder: Path, policy: Policy, ready: Prepared, dagger: Dagger, number: int) -> dict[str, Any]:
    """Let the policy drive and the expert label; writes the dataset ``folder/<number>`` unless it is there.

    Returns:
        What ``folder/rounds.json`` says of the round: episodes, frames, successes of the policy.
    """
    kept = folder / "rounds.json"
    rounds: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    if str(number) in rounds and (folder / str(number)).exists():
        return dict(rounds[str(number)])
    table = make_tabletop(dagger.env, noise=dagger.noise)
    first = DAGGER_SEED + (number - 1) * dagger.episodes
    seeds = range(first, first + dagger.episodes)
    draft = folder / f".{number}"
    for broken in (draft, folder / str(number)):  # of a round that was broken off; it is collected again, the same
        shutil.rmtree(broken, ignore_errors=True)
    frames, successes = 0, 0
    with LeRobotWriter(draft, table.spec, table.spec.action.rate, robot_type="vola-tabletop") as writer:
        visited = relabel(table, seeds, policy, ready.system.execute, beta=dagger.beta**number if dagger.beta else 0.0)
        for episode in visited:
            d = episode.demonstration
            writer.add_episode(d.images, d.state, d.action, d.instruction)
            frames, successes = frames + len(d.action), successes + episode.success
    draft.replace(folder / str(number))
    rounds[str(number)] = {"episodes": len(seeds), "frames": frames, "successes": successes, "first_seed": first}
    text = kept.with_suffix(".draft")
    text.write_text(json.dumps(rounds, indent=1))
    text.replace(kept)
    return dict(rounds[str(number)])


def round_sentence(number: int, made: Mapping[str, Any]) -> str:
    """What a round brought, for the terminal and the run's notes."""
    return (
        f"DAgger round {number}: the expert labelled {made['frames']} frames of {made['episodes']} episodes, in "
        f"{made['successes']} of which the policy succeeded"
    )


def read_rounds(out: Path) -> tuple[str, ...]:
    """The sentences of all rounds of a run."""
    kept = out / "dagger" / "rounds.json"
    rounds: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    return tuple(round_sentence(int(n), made) for n, made in rounds.items())


def _aggregate(ready: Prepared, folders: Sequence[Path]) -> Windows:
    """Windows over the training demonstrations and every collected round."""
    system, own = ready.system, [e.index for e in ready.train.episodes]
    joined = JoinedDataset((ready.dataset, *(open_lerobot(folder) for folder in folders)))
    before = {e.index for e in ready.dataset.episodes}
    new = [e.index for e in joined.episodes if e.index not in before]
    return Windows(joined, [*own, *new], system.T, system.H, system.image_size, stride=system.train.stride)
