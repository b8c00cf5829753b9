"""``vola show``: what a checkpoint or a system is made of, in plain text."""

from __future__ import annotations

from pathlib import Path

from vola import checkpoint
from vola.data.stats import Normaliser
from vola.envs.tabletop import make_tabletop
from vola.model.layers import count_parameters
from vola.policy import Policy
from vola.system import describe
from vola.workflow import SYSTEMS, find_system


def show(what: str, size: str = "small") -> str:
    """Text for a checkpoint folder, a run, or a system's name (then for the robot of vola/Detour-v0).

    Raises:
        CheckpointError: no such checkpoint. ConfigError: the system does not come in that size.
    """
    if what in SYSTEMS and not Path(what).exists():
        return describe(find_system(what, size)(make_tabletop("vola/Detour-v0").spec))
    loaded = checkpoint.load(Path(what))
    policy = loaded.policy
    words = max(policy.tokenizer.encode([text])[0].shape[1] for text in loaded.fitted.instructions)
    layout = policy.backbone.layout(words)
    parts = [
        f"{loaded.folder}  step {loaded.step}  fingerprint {loaded.manifest['fingerprint']}",
        describe(loaded.system),
        _parameters(policy),
        f"Layout (rows look at columns)\n{layout.picture()}\n{layout.explain()}",
        f"Cost: {policy.head.cost().serial} passes of the network per chunk",
        _normaliser("state", policy.state_normaliser),
        _normaliser("action", policy.action_normaliser),
        f"Vocabulary: {len(policy.tokenizer.words)} words; {len(loaded.fitted.instructions)} training instructions",
        f"Trained on dataset {loaded.fitted.dataset} (content / training episodes)",
        "Versions: " + ", ".join(f"{k} {v}" for k, v in loaded.manifest["versions"].items()),
    ]
    return "\n\n".join(parts)


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
