"""``vola show``: what a checkpoint, a system or the heads are made of, in plain text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vola import checkpoint
from vola.data.episodes import Episode, MemoryDataset
from vola.data.stats import Normaliser
from vola.envs.tabletop import CAMERA, make_tabletop
from vola.fit import Fitted, fit
from vola.heads.pairing import tokenizer_config
from vola.model.layers import count_parameters
from vola.policy import Policy
from vola.rollout.collect import demonstrate
from vola.system import System, describe
from vola.variants import HEADS, with_head
from vola.workflow import SYSTEMS, find_system

# What a system that was never trained is shown for: its sizes, and floors in metres, need a robot and some data.
TASK, EPISODES = "vola/Detour-v0", 32


def show(what: str, size: str = "small", head: str | None = None) -> str:
    """Text for a checkpoint folder, a run, "heads", or a system's name (then for the robot of vola/Detour-v0).

    Raises:
        CheckpointError: no such checkpoint. ConfigError: the system does not come in that size, or no such head.
    """
    if what == "heads" and not Path(what).exists():
        return _heads(size)
    if what in SYSTEMS and not Path(what).exists():
        system = find_system(what, size)(make_tabletop(TASK).spec)
        system = system if head is None else with_head(system, head)
        fitted = _fitted(system)
        title = f"{system.name} ({size}), untrained, for the robot and {EPISODES} demonstrations of {TASK}"
        return "\n\n".join([title, *_parts(system, system.build(fitted), fitted)])
    loaded = checkpoint.load(Path(what))
    title = f"{loaded.folder}  step {loaded.step}  fingerprint {loaded.manifest['fingerprint']}"
    ending = [
        f"Trained on dataset {loaded.fitted.dataset} (content / training episodes)",
        "Versions: " + ", ".join(f"{k} {v}" for k, v in loaded.manifest["versions"].items()),
    ]
    return "\n\n".join([title, *_parts(loaded.system, loaded.policy, loaded.fitted), *ending])


def _parts(system: System, policy: Policy, fitted: Fitted) -> list[str]:
    words = max(policy.tokenizer.encode([text])[0].shape[1] for text in fitted.instructions)
    layout = policy.backbone.layout(words)
    return [
        describe(system),
        _parameters(policy),
        f"Layout (rows look at columns)\n{layout.picture()}\n{layout.explain()}",
        _cost(policy),
        _floor(policy),
        _normaliser("state", policy.state_normaliser),
        _normaliser("action", policy.action_normaliser),
        f"Vocabulary: {len(policy.tokenizer.words)} words; {len(fitted.instructions)} training instructions"
        + ("" if fitted.action_tokenizer is None else f"; {fitted.action_tokenizer.vocabulary} action tokens"),
    ]


def _fitted(system: System) -> Fitted:
    """Statistics of a few fresh demonstrations."""
    table = make_tabletop(TASK)
    made = list(demonstrate(table.config, EPISODES))
    data = MemoryDataset(
        table.spec,
        table.spec.action.rate,
        tuple(Episode(i, len(d.action), d.instruction) for i, d in enumerate(made)),
        {"state": [d.state for d in made], "action": [d.action for d in made]},
        {CAMERA: [np.ascontiguousarray(d.images[CAMERA].transpose(0, 3, 1, 2)) for d in made]},
    )
    tokens = tokenizer_config(system.head)
    return fit(data, range(len(made)), system.H, system.transforms, tokens, system.normalise_actions)


def _heads(size: str) -> str:
    """One line per head: rule, network, weights, passes, floor."""
    base = find_system("pi0", size)(make_tabletop(TASK).spec)
    rows: list[Sequence[str]] = [("head", "rule", "network", "weights", "passes", "floor, mm")]
    for name in HEADS:
        system = with_head(base, name)
        policy = system.build(_fitted(system))
        cost, floor = policy.head.cost(), 1000 * policy.head.floor(policy.action_normaliser).rms.max()
        rule, network = type(system.head).__name__, type(system.network).__name__
        rows.append((name, rule, network, f"{count_parameters(policy):,}", f"{cost.serial}", f"{floor:.2f}"))
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)).rstrip() for row in rows)
    return f"Heads on pi0 ({size}) for {TASK}; passes at most; floor: rms of the least exact dimension\n\n{table}"


def _cost(policy: Policy) -> str:
    cost = policy.head.cost()
    side = f", {cost.parallel} side by side" if cost.parallel > 1 else ""
    return f"Cost: {cost.serial} {'pass' if cost.serial == 1 else 'passes'} of the network per chunk{side}"


def _floor(policy: Policy) -> str:
    floor, spec = policy.head.floor(policy.action_normaliser), policy.spec.action
    if not floor.worst.any():
        return "Floor: none, the head is continuous"
    lines = [
        f"  {name:<28} rms {rms:>10.4g}  worst {worst:>10.4g}  {unit}"
        for name, unit, rms, worst in zip(spec.names, spec.units, floor.rms, floor.worst, strict=True)
    ]
    return "\n".join(["Floor: the smallest error that the head's quantisation leaves", *lines])


def _parameters(policy: Policy) -> str:
    rows = [("backbone", policy.backbone), *((f"  {n}", m) for n, m in policy.backbone.named_children())]
    rows += [("head", policy.head), *((f"  {n}", m) for n, m in policy.head.named_children())]
    lines = [f"{name:<16}{count_parameters(module):>12,}" for name, module in rows]
    return "\n".join(["Parameters", *lines, f"{'total':<16}{count_parameters(policy):>12,}"])


def _normaliser(key: str, normaliser: Normaliser) -> str:
    lines = [f"Normaliser of {key} ({', '.join(sorted(set(normaliser.kinds)))}, {normaliser.transform})"]
    for i, name in enumerate(normaliser.names):
        note = "  constant" if i in normaliser.constant else "  guarded" if i in normaliser.guarded else ""
        shift, scale = normaliser.shift[i], normaliser.scale[i]
        lines.append(
            f"  {name:<28} shift {shift:>10.4g}  scale {scale:>10.4g}  "
            f"range [{normaliser.low[i]:.4g}, {normaliser.high[i]:.4g}]{note}"
        )
    return "\n".join(lines)
