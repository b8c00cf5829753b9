"""One folder per checkpoint, complete or absent: weights, statistics, system, versions; safetensors and JSON only.

    checkpoints/00001000/
        policy.safetensors     the weights that act (the average of weights where a run keeps one)
        system.json  fitted.json
        training.safetensors   live weights and optimiser moments; only needed to resume
        manifest.json          step, versions, dataset, SHA-256 of every file above

A checkpoint is written under a hidden name, flushed to disk and then renamed, so a crash, a full disk or kill -9 at
any moment leaves every earlier checkpoint as it was. Data order and noise are functions of (seed, step), so weights,
moments and the step are all there is to resume exactly.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import vola
from vola.errors import CheckpointError, ConfigError, VolaError
from vola.fit import Fitted
from vola.heads.pairing import sampling_settings
from vola.policy import Policy
from vola.system import System

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class TrainingState:
    """What resuming needs beside the policy: finished steps, live weights, optimiser moments by weight name."""

    step: int
    weights: Mapping[str, Tensor]
    optimiser: Mapping[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read back; ``policy`` holds the weights that act."""

    folder: Path
    step: int
    system: System
    fitted: Fitted
    policy: Policy
    manifest: Mapping[str, Any]


def save(run: Path, system: System, fitted: Fitted, acting: Mapping[str, Tensor], training: TrainingState) -> Path:
    """Write ``run/checkpoints/<step>`` and return it. A complete checkpoint of that step is left as it is.

    Raises:
        CheckpointError: the disk is full or not writable; earlier checkpoints are intact.
    """
    parent = run / "checkpoints"
    final = parent / f"{training.step:08d}"
    if (final / MANIFEST).is_file():
        return final
    draft = parent / f".{final.name}.{os.getpid()}"
    try:
        for stale in parent.glob("." + "[0-9]" * 8 + ".*"):
            shutil.rmtree(stale)
        draft.mkdir(parents=True)
        save_file(_plain(acting), draft / "policy.safetensors")
        live = {f"weights/{k}": v for k, v in training.weights.items()}
        save_file(_plain(live | dict(training.optimiser)), draft / "training.safetensors")
        (draft / "system.json").write_text(system.to_json())
        (draft / "fitted.json").write_text(fitted.to_json())
        files = {f.name: _sha256(f) for f in sorted(draft.iterdir())}
        manifest = {
            "step": training.step,
            "fingerprint": _fingerprint(files),
            "dataset": fitted.dataset,
            "versions": versions(),
            "files": files,
        }
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=2))
        for file in draft.iterdir():
            _flush(file)
        os.rename(draft, final)
        _flush(parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        kept = [f.name for f in complete(run)]
        raise CheckpointError(
            f"could not save step {training.step} in {parent}: {error}. Intact checkpoints: {kept or 'none'}. "
            "Free disk space or choose another folder, then run the same command with --resume."
        ) from error
    return final


def complete(run: Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first."""
    folders = (run / "checkpoints").glob("[0-9]" * 8)
    return sorted(f for f in folders if (f / MANIFEST).is_file())


def forget(run: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` complete checkpoints."""
    for folder in complete(run)[:-keep]:
        hidden = folder.with_name(f".{folder.name}.old")  # half-removed must never look complete
        folder.rename(hidden)
        shutil.rmtree(hidden)


def find(path: Path | str) -> Path:
    """The checkpoint folder that ``path`` means: itself, or the newest one of the run it names.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    found = complete(path)
    if not found:
        runs = sorted(str(p) for p in path.glob("*") if complete(p))
        hint = f"Runs inside it: {', '.join(runs)}." if runs else "Train one with `vola train`."
        raise CheckpointError(
            f"{path}: expected a checkpoint folder or a run with checkpoints/<step>/{MANIFEST}, found neither. {hint}"
        )
    return found[-1]


def load(path: Path | str) -> Checkpoint:
    """Read a checkpoint (or the newest one of a run) and build its policy.

    Raises:
        CheckpointError: none there, a file altered or missing, or a missing, extra or mis-shaped weight.
    """
    folder = find(path)
    manifest = _manifest(folder)
    for name, digest in manifest["files"].items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: {name} is missing. Copy the whole checkpoint folder again.")
        if _sha256(folder / name) != digest:
            raise CheckpointError(f"{folder}: {name} is not the file that was saved (SHA-256 differs). Restore it.")
    try:
        system = System.from_json((folder / "system.json").read_text())
        fitted = Fitted.from_json((folder / "fitted.json").read_text())
        policy = system.build(fitted)
    except VolaError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{folder}: system.json and fitted.json cannot be understood ({error}). Restore them from a copy."
        ) from error
    load_weights(policy, _tensors(folder / "policy.safetensors"), str(folder / "policy.safetensors"))
    policy.eval()
    return Checkpoint(folder, manifest["step"], system, fitted, policy, manifest)


def with_changes(loaded: Checkpoint, changes: Mapping[str, Any]) -> Checkpoint:
    """The same weights under other settings for sampling and execution, e.g. {"head.steps": 5, "execute": Ensemble()}.

    Raises:
        ConfigError: a setting that is not about how a trained policy acts; all others were fixed by training.
    """
    free = sampling_settings(loaded.system.head)
    wrong = [n for n in changes if n.split(".")[0] != "execute" and n not in free]
    if wrong:
        raise ConfigError(
            f"{loaded.folder}: expected settings of how a trained policy samples and acts, out of "
            f"{[*free, 'execute...']}, got {wrong}. Others were fixed by training."
        )
    system = loaded.system.override(changes)
    policy = system.build(loaded.fitted)
    load_weights(policy, loaded.policy.state_dict(), str(loaded.folder))
    return replace(loaded, system=system, policy=policy.eval())


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}). Restore it from a copy.") from error


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST}: expected JSON ({error}). Restore the folder.") from error
    missing = {"step", "fingerprint", "files", "versions"} - set(manifest if isinstance(manifest, dict) else ())
    if missing:
        raise CheckpointError(f"{folder / MANIFEST}: expected {sorted(missing)}, got none. Restore the folder.")
    return dict(manifest)


def load_training(folder: Path) -> TrainingState:
    """The training state beside a checkpoint's policy; raises CheckpointError where it is missing."""
    if not (folder / "training.safetensors").is_file():
        raise CheckpointError(f"{folder}: training.safetensors is missing, so this run cannot go on. Restore it.")
    tensors = _tensors(folder / "training.safetensors")
    weights = {k.removeprefix("weights/"): v for k, v in tensors.items() if k.startswith("weights/")}
    optimiser = {k: v for k, v in tensors.items() if not k.startswith("weights/")}
    return TrainingState(_manifest(folder)["step"], weights, optimiser)


def load_weights(module: torch.nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Copy weights into a module that must have exactly these.

    Raises:
        CheckpointError: listing every missing, extra and mis-shaped weight; the module is left untouched.
    """
    own = module.state_dict()
    problems = [f"missing {k} {tuple(own[k].shape)}" for k in own if k not in weights]
    problems += [f"extra {k} {tuple(weights[k].shape)}" for k in weights if k not in own]
    problems += [
        f"{k}: expected shape {tuple(own[k].shape)}, got {tuple(weights[k].shape)}"
        for k in own
        if k in weights and own[k].shape != weights[k].shape
    ]
    if problems:
        shown = "\n  ".join(problems[:12]) + (f"\n  ... and {len(problems) - 12} more" if len(problems) > 12 else "")
        raise CheckpointError(f"{source} does not fit the system it came with; nothing was loaded:\n  {shown}")
    module.load_state_dict(dict(weights))


def versions() -> dict[str, str]:
    """Versions of everything that computes."""
    return {
        "vola": vola.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.detach().cpu().contiguous() for k, v in tensors.items()}


def _fingerprint(files: Mapping[str, str]) -> str:
    """Of weights, settings, statistics, vocabulary and code version: of everything that decides an output."""
    relevant = [files[name] for name in ("policy.safetensors", "system.json", "fitted.json")]
    return hashlib.sha256("".join([*relevant, vola.__version__]).encode()).hexdigest()[:12]


def _sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Force a file (or a folder's entries) to the disk before anything relies on it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
