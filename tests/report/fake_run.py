"""A run folder as a real run leaves it, invented: a bimodal detour round a wall, a flow policy and an L2 baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw
from safetensors.numpy import save_file

from vola.report.heldout import heldout_record
from vola.types import ActionSpec

SIDE = 256
COLOURS = {"red": (205, 62, 54), "blue": (52, 104, 196), "green": (58, 150, 92), "yellow": (222, 174, 52)}
LAYOUT = """(rows = who looks)   image  text  state  action
image  x8              #     #     .      .
text   x1              #     #     .      .
state  x1              #     #     #      .
action x16             #     #     #      #"""


def write_run(run: Path, rng: np.random.Generator, episodes: int = 200, side: int = SIDE) -> Path:
    """A complete run: summary, logs, rollouts, samples; no held-out error."""
    outcomes = {"pi0": rng.random(episodes) < 0.97, "L2": np.zeros(episodes, bool), "expert": np.ones(episodes, bool)}
    write_json(run / "summary.json", summary(outcomes))
    write_log(run / "log.jsonl", rng, "pi0", 1.6, 0.042, (0.08, 0.55, 0.82, 0.93, 0.97))
    write_log(run / "baseline" / "log.jsonl", rng, "L2", 0.31, 0.043, (0.0, 0.01, 0.0, 0.0, 0.0))
    write_rollouts(run / "rollouts.parquet", rng, outcomes)
    write_samples(run / "samples.safetensors", rng, side)
    return run


def summary(outcomes: dict[str, np.ndarray]) -> dict[str, Any]:
    roles = {"pi0": "policy", "L2": "baseline", "expert": "expert"}
    return {
        "name": "detour-pi0",
        "system": "pi0.tiny",
        "fingerprint": "7c1e09bb42aa",
        "env": "vola/Detour-v0",
        "headline": {
            "claim": "Every start state was demonstrated twice, once round either side of the wall. Same data, same "
            "network, same budget: only the head differs."
        },
        "policies": [
            {
                "name": n,
                "role": roles[n],
                "successes": int(o.sum()),
                "episodes": len(o),
                "k": None if n == "expert" else 4,
            }
            for n, o in outcomes.items()
        ],
        "minutes": 2.47,
        "samples_per_second": 1523.4,
        "flops_share": 0.314,
        "plan_ms": {"median": 6.13, "90 % below": 7.02},
        "command": ["vola", "demo", "--minutes", "2.5", "--seed", "7"],
        "seeds": {"training": 7, "demonstrations": 0, "evaluation": "100000 to 100199"},
        "dataset": {
            "path": "runs/detour-pi0/data",
            "fingerprint": "b1946ac92492d234",
            "episodes": 3000,
            "frames": 42113,
            "notes": [],
            "train_episodes": 2900,
            "val_episodes": 100,
        },
        "cameras": ["top 48 x 48"],
        "normaliser": {
            "state": {"kind": "mean_std", "constant": []},
            "action": {"kind": "quantile", "from": "2900 training episodes", "constant": ["gripper"]},
        },
        "parameters": {"total": 1360514, "backbone": 1243170, "head": 117344},
        "versions": {"vola": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "numpy": "2.4.6"},
        "layout": {
            "picture": LAYOUT,
            "explain": "action reads image, text, state, itself; nothing reads action.",
        },
        "sources": [
            {
                "paper": "Black et al., pi0: A Vision-Language-Action Flow Model for General Robot Control, 2024",
                "equation": "section IV",
                "convention": "tau = 0 is noise, tau = 1 is data",
                "url": "https://arxiv.org/abs/2410.24164",
            },
            {
                "paper": "Lipman et al., Flow Matching for Generative Modeling, 2022",
                "equation": "eq. 23",
                "convention": "linear path, target velocity A1 - A0",
                "url": "https://arxiv.org/abs/2210.02747",
            },
        ],
    }


def write_json(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")


def write_log(file: Path, rng: np.random.Generator, policy: str, start: float, end: float, success: tuple) -> None:
    steps, n = 3000, 200
    rows: list[dict[str, Any]] = []
    for step in range(10, steps + 1, 10):
        loss = (end + (start - end) * np.exp(-step / 260)) * np.exp(0.13 * rng.standard_normal())
        row = {"kind": "train", "step": step, "loss": loss, "lr": 3e-3, "grad_norm": 0.4, "samples_per_second": 1523.0}
        rows.append(row | {"seconds": step / 24})
        if step % 300 == 0:
            rows.append({"kind": "val", "step": step, "loss": 1.12 * (end + (start - end) * np.exp(-step / 260))})
        if step % 600 == 0:
            rate = success[step // 600 - 1]
            rows.append({"kind": "eval", "step": step, "policy": policy, "successes": round(rate * n), "episodes": n})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_rollouts(file: Path, rng: np.random.Generator, outcomes: dict[str, np.ndarray]) -> None:
    roles = {"pi0": "policy", "L2": "baseline", "expert": "expert"}
    latency = {"pi0": 6.1, "L2": 0.9, "expert": None}
    colours = rng.choice(list(COLOURS), len(outcomes["pi0"]))
    rows = []
    for policy, successes in outcomes.items():
        for i, success in enumerate(successes):
            rows.append(
                {
                    "policy": policy,
                    "role": roles[policy],
                    "task": "detour",
                    "instruction": f"go to the {colours[i]} disc",
                    "seed": 100_000 + i,
                    "start_hash": f"{i * 2654435761 % 2**32:08x}",
                    "success": bool(success),
                    "length": int(14 + rng.integers(0, 6)) if success else 40,
                    "plan_ms": latency[policy] and latency[policy] * float(np.exp(0.1 * rng.standard_normal())),
                    "failure": "" if success else ("hit the wall" if rng.random() < 0.9 else "out of time"),
                }
            )
    pq.write_table(pa.Table.from_pylist(rows), file)


def write_samples(file: Path, rng: np.random.Generator, side: int = SIDE) -> None:
    tensors: dict[str, np.ndarray] = {}
    info: dict[str, Any] = {}
    for i in range(8):
        policy = "pi0" if i < 4 else "L2"
        way = (1 if i % 2 else -1) if policy == "pi0" else 0
        success = policy == "pi0" and i != 3
        path = _way(way, 0.02 * rng.standard_normal(), 14)
        path = path if success else path[: 8 if way == 0 else 12]
        colour = list(COLOURS)[i % 4]
        tensors[f"rollout/{i}/frames"] = np.stack([picture(p, side) for p in path])
        failure = "" if success else ("hit the wall" if way == 0 else "out of time")
        told = f"go to the {colour} disc"
        info[f"rollout/{i}"] = {"policy": policy, "instruction": told, "success": success, "failure": failure}
    for i in range(2):
        for policy, n in (("pi0", 64), ("L2", 16)):
            ways = rng.choice([-1, 1], n) if policy == "pi0" else np.zeros(n)
            paths = np.stack([_way(w, 0.03 * rng.standard_normal() * abs(w), 17) for w in ways]) * SIDE
            tensors[f"fan/{i}/{policy}/image"] = picture(_way(0, 0.0, 14)[i], SIDE)
            tensors[f"fan/{i}/{policy}/paths"] = paths.astype(np.float32)
            info[f"fan/{i}/{policy}"] = {"instruction": f"go to the {list(COLOURS)[i]} disc"}
    save_file(tensors, file, {"info": json.dumps(info)})


def _way(side: float, jitter: float, steps: int) -> np.ndarray:
    """A path (x, y in 0..1, y down) from below the wall to the discs, left (-1), right (+1) or straight (0)."""
    t = np.linspace(0, 1, steps)
    x = 0.5 + side * 0.3 * np.sin(np.pi * t) + jitter * np.sin(np.pi * t) + 0.06 * side * t
    return np.stack([x, 0.88 - (0.73 if side else 0.36) * t + 0.4 * jitter * t], axis=1)


def picture(robot: np.ndarray, side: int) -> np.ndarray:
    """The scene from above, uint8 ``side side 3``."""
    scale = 2 * side
    image = Image.new("RGB", (scale, scale), (240, 240, 240))
    draw = ImageDraw.Draw(image)
    draw.rectangle([0.34 * scale, 0.45 * scale, 0.66 * scale, 0.55 * scale], fill=(92, 96, 104))
    for i, colour in enumerate(COLOURS.values()):
        _disc(draw, 0.2 + 0.2 * i, 0.15, 0.045, scale, colour)
    _disc(draw, robot[0], robot[1], 0.032, scale, (38, 40, 46))
    return np.asarray(image.resize((side, side), Image.Resampling.LANCZOS))


def _disc(draw: ImageDraw.ImageDraw, x: float, y: float, r: float, scale: int, fill: tuple) -> None:
    draw.ellipse([(x - r) * scale, (y - r) * scale, (x + r) * scale, (y + r) * scale], fill=fill)


def write_dataset_run(run: Path, rng: np.random.Generator, episodes: int = 12, H: int = 16) -> Path:
    """A run on recorded data without an environment: summary, log and held-out error."""
    content = summary({"pi0": np.ones(1, bool)})
    content |= {"name": "g1-pi0", "system": "pi0.small", "env": None, "policies": [], "headline": {}}
    content["command"] = ["vola", "train", "pi0.small", "--data", "data/g1", "--minutes", "20"]
    content["dataset"] |= {
        "path": "data/g1",
        "episodes": 12,
        "notes": ["88 of 100 episodes lack their video on disk and were left out."],
    }
    write_json(run / "summary.json", content)
    write_log(run / "log.jsonl", rng, "pi0", 1.3, 0.09, (0.0,) * 5)
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "log.jsonl").write_text("".join(line for line in lines if '"eval"' not in line))
    write_json(run / "heldout.json", heldout(rng, episodes, H))
    return run


def heldout(rng: np.random.Generator, episodes: int, H: int) -> dict[str, Any]:
    """Errors of 14 arm joints: the policy is poor at the first steps and good later; holding is the reverse."""
    names = ("left_shoulder_pitch", "left_elbow", "right_shoulder_pitch", "right_elbow")
    spec = ActionSpec(names, ("rad",) * 4, ("position",) * 4, 30.0)
    windows, h = 40 * episodes, np.arange(1, H + 1)[None, :, None]
    shapes = {
        "policy": 0.016 + 0.0011 * h,
        "hold": 0.0052 * h,
        "mean": 0.21 + 0 * h,
        "linear": 0.0035 * h + 0.00055 * h**2,
    }
    episode = np.repeat(np.arange(episodes) + 3, 40)
    hard = np.exp(0.25 * rng.standard_normal(episodes))[episode - 3][:, None, None]
    joint = np.exp(0.35 * rng.standard_normal(4))[None, None]
    error = {k: s * hard * joint * np.abs(1 + 0.4 * rng.standard_normal((windows, H, 4))) for k, s in shapes.items()}
    valid = np.ones((windows, H), bool)
    valid[39::40, H // 2 :] = False
    return heldout_record(spec, error, valid, episode, np.ones(4))
