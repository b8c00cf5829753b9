"""The house rules of ARCHITECTURE.md, checked: arrows point one way, budgets hold, importing does nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "vola"

# Top to bottom as in ARCHITECTURE.md. A file imports only from lines above its own (files of a package in order).
LAYERS = """
types errors cite
theory: quantisation statistics filters compounding
envs: painting scene tasks insert chase tabletop experts gym_env gym_ids
data: episodes png video transforms stats lerobot_meta lerobot_files lerobot_finalise lerobot_write lerobot
data: joined windows mixture idle summary
tokenizers: text actions bins fast
data: tokens
model: mask_text layout layouts attention positions norms layers trunk vision language backbone networks
model: conditioning readout decoders unet token_networks
heads: base tokens solvers guidance likelihood noising schedules regression flow diffusion cvae categorical fast pairing
fit policy executor ensemble realtime system checkpoint variants
systems: pi0 regression
train: optim loop throughput
rollout: latency rollout collect dagger samples heldout decision
report: fields counts records heldout words evaluations theme charts animation sections used page
summary dagger workflow demo show
lab: findings jobs modes chunks precision compose latency heads ledger
cli __main__
"""
# errors stands beside types, and types uses it: the two lowest files are ordered here.
ORDER = ["errors", "types", "cite"]
FILE_LINES, FUNCTION_LINES, SYSTEM_LINES = 400, 60, 60


def order() -> list[str]:
    names = list(ORDER)
    for line in LAYERS.split("\n")[2:]:
        package, colon, files = line.partition(":")
        names += [f"{package}.{f}" for f in files.split()] if colon else line.split()
    return names


def module(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


FILES = sorted(p for p in SOURCE.rglob("*.py") if p.name != "__init__.py")


def imports(path: Path) -> set[str]:
    """Every vola module that a file imports, at the top or inside a function."""
    found = set()
    known = {module(p) for p in FILES}
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vola":
            base = node.module.removeprefix("vola").removeprefix(".")
            names = [base] + [f"{base}.{a.name}".removeprefix(".") for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name.removeprefix("vola.") for a in node.names if a.name.startswith("vola.")]
        found |= {n for n in names if n in known}
    return found


def test_every_file_has_its_place() -> None:
    assert sorted(order()) == sorted(module(p) for p in FILES)


@pytest.mark.parametrize("path", FILES, ids=module)
def test_arrows_point_up(path: Path) -> None:
    place = {name: i for i, name in enumerate(order())}
    own = module(path)
    later = sorted(n for n in imports(path) if place[n] >= place[own] and n != own)
    assert not later, f"{own} imports {later}, which stand below it"


@pytest.mark.parametrize("path", FILES, ids=module)
def test_budgets(path: Path) -> None:
    text = path.read_text()
    lines = text.count("\n")
    limit = SYSTEM_LINES if path.parent.name == "systems" else FILE_LINES
    assert lines <= limit, f"{lines} lines, {limit} allowed"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{node.name} has {length} lines, {FUNCTION_LINES} allowed"


def fresh(code: str) -> str:
    """Standard output of code in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_does_nothing() -> None:
    """No output, seed, environment variable, thread setting, warning filter or registered environment changes."""
    modules = [f"vola.{m}" for m in order() if m != "__main__"]
    out = fresh(
        f"""
        import importlib, os, random, signal, warnings
        import numpy as np, torch, gymnasium
        import av, jaxtyping, jinja2, matplotlib.figure, PIL.Image, pyarrow.parquet, rich.progress, safetensors.torch
        import scipy.stats, tokenizers, torch.nn.attention.flex_attention, torch.utils.flop_counter, tyro
        def world():
            return (
                dict(os.environ), os.getcwd(), random.getstate(), repr(np.random.get_state()),
                torch.get_rng_state().tolist(), torch.get_num_threads(), torch.get_default_dtype(),
                torch.are_deterministic_algorithms_enabled(), sorted(gymnasium.registry),
                signal.getsignal(signal.SIGINT), warnings.filters[:],
            )
        before = world()
        for name in {modules!r}:
            importlib.import_module(name)
        print([i for i, (a, b) in enumerate(zip(before, world())) if a != b])
        """
    )
    assert out == "[]\n"


def test_the_light_modules_need_no_torch() -> None:
    light = ["types", "errors", "cite", "cli", *(m for m in order() if m.split(".")[0] in ("theory", "envs"))]
    out = fresh(
        f"""
        import importlib, sys
        for name in {light!r}:
            importlib.import_module("vola." + name)
        print("torch" in sys.modules, "matplotlib" in sys.modules)
        """
    )
    assert out == "False False\n"


def test_no_forbidden_mechanism() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "everything"
                assert caught not in ("everything", "Exception", "BaseException"), f"{path}:{node.lineno} {caught}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{path}:{node.lineno}"
            if isinstance(node, ast.Import):
                assert not {a.name for a in node.names} & {"pickle", "yaml", "shelve", "marshal"}, path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                forbidden = {"torch.load", "torch.save", "torch.manual_seed", "np.random.seed"}
                if module(path) == "system":
                    forbidden.remove("torch.manual_seed")  # inside fork_rng, so the caller's generator is untouched
                assert called not in forbidden, f"{path}:{node.lineno} {called}"
