"""A run folder -> one self-contained HTML page (``report.html``): no network, both themes, any width, printable."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vola.report import sections, used, words
from vola.report.charts import Chart
from vola.report.evaluations import evaluations
from vola.report.sections import Records, read_records
from vola.report.theme import DARK, LIGHT, variables

HERE = Path(__file__).parent
BOOTSTRAP_SEED = 0  # the page of the same records is the same page


def build_report(run: Path) -> Path:
    """Write ``run/report.html`` from the records in ``run`` and return its path.

    Needs ``summary.json``; a section whose records are absent is left out. The page loads nothing: pictures, charts,
    style and script are inside it. Formats: ``vola.report.records`` and ``vola.report.heldout``.

    Raises:
        DataError: a record is missing, cut off or contradicts another; names file and key.
    """
    page = render(read_records(run))
    target = run / "report.html"
    unfinished = run / "report.html.part"
    unfinished.write_text(page, encoding="utf-8")
    os.replace(unfinished, target)
    return target


def render(records: Records) -> str:
    """The page as HTML text. All texts of the records are escaped; only our own SVG goes in as markup."""
    # The template holds no user text; the records come in through autoescaped variables.
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = _svg
    rows = sections.bars(records.summary)
    return environment.get_template("page.html.jinja").render(
        summary=records.summary,
        light=variables(LIGHT),
        dark=variables(DARK),
        bars=rows,
        same_n=len({row["n"] for row in rows}) <= 1,
        paired=words.paired_sentence(records.summary, records.rollouts),
        decoding=sections.decoding(records),
        learning=sections.learning(records),
        outcomes=sections.outcomes(records),
        evaluations=evaluations(records.evaluations, records.summary.fingerprint, records.summary.env),
        clips=sections.clips(records),
        fans=sections.fans(records),
        heldout=sections.heldout(records, np.random.default_rng(BOOTSTRAP_SEED)),
        layout=sections.layout(records.summary),
        speed=sections.speed(records),
        used=used.used(records),
    )


def _svg(chart: Chart) -> Markup:
    """Both drawings of a chart; the style sheet shows the one that fits. Text in them was escaped by matplotlib."""
    described = Markup('<div class="chart" role="img" aria-label="{}">').format(chart.description)
    return described + Markup(f'<div class="wide">{chart.wide}</div><div class="narrow">{chart.narrow}</div></div>')
