"""The experiments by name, and running one: jobs, rows, finding, page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from vola.errors import ConfigError
from vola.lab import chunks, compose, heads, latency, modes, precision
from vola.lab.findings import Finding, Plan, write_finding
from vola.lab.jobs import PROCESSES, run_jobs

LABS: Mapping[str, ModuleType] = {
    "modes": modes, "chunks": chunks, "precision": precision, "compose": compose, "latency": latency,
    "heads": heads,
}  # fmt: skip


def listing() -> str:
    """One line per experiment: name, claim, number of trainings."""
    lines = [f"{name:<10} {module.CLAIM}  ({len(module.jobs(Plan()))} trainings)" for name, module in LABS.items()]
    return "\n".join(lines)


def run_lab(name: str, plan: Plan, out: Path, pages: Path, command: str, processes: int = PROCESSES) -> Finding:
    """Train and evaluate what is missing, write the page into ``pages``, return the finding.

    Raises:
        ConfigError: no such experiment, or answers of another plan under ``out``.
        KeyboardInterrupt: stopped; everything finished is kept and the same call goes on.
    """
    if name not in LABS:
        raise ConfigError(f"lab: expected one of {sorted(LABS)}, got {name!r}")
    rows = run_jobs(LABS[name].jobs(plan), out, processes)
    finding: Finding = LABS[name].analyse(rows, plan, out)
    if plan.scale != 1 or plan.size != "small":
        said = f"Trial run ({plan.size}, scaled by {plan.scale:g}): no verdict. {finding.sentence}"
        finding = replace(finding, verdict="inconclusive", sentence=said)
    write_finding(finding, plan, rows, command, pages)
    return finding
