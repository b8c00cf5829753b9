"""Colours with a meaning, once for the light and once for the dark page; charts and page share them.

A chart is drawn with a stand-in colour per role; ``themed`` then replaces every stand-in by ``var(--role)``, so one
SVG follows the page's theme.
"""

from __future__ import annotations

import re

LIGHT = {
    "paper": "#fcfbf8", "card": "#ffffff", "ink": "#1b1d20", "soft": "#5b6067", "line": "#e3e0d8",
    "policy": "#1d5fae", "baseline": "#b3530b", "expert": "#59626d",
    "hold": "#87467c", "mean": "#666a1f", "linear": "#00726a",
    "good": "#1a7541", "bad": "#b0271f",
}  # fmt: skip
DARK = {
    "paper": "#15171a", "card": "#1d2024", "ink": "#ebe9e4", "soft": "#a6acb5", "line": "#33373d",
    "policy": "#7fb6f7", "baseline": "#f0a35e", "expert": "#b0b8c2",
    "hold": "#d7a0d1", "mean": "#c6c878", "linear": "#62d0c2",
    "good": "#72cf99", "bad": "#ff9087",
}  # fmt: skip

# Odd on purpose: no chart would contain such a colour by chance.
STAND_IN = {role: f"#5eed{i:02x}" for i, role in enumerate(LIGHT, 0x10)}

NAIVE = ("hold", "mean", "linear")


def variables(palette: dict[str, str]) -> str:
    """The palette as CSS custom properties."""
    return "".join(f"--{role}:{colour};" for role, colour in palette.items())


def naive_role(name: str, position: int) -> str:
    """The colour role of a held-out baseline: its own if it has one, otherwise by position."""
    return name if name in NAIVE else NAIVE[position % len(NAIVE)]


def themed(svg: str, prefix: str) -> str:
    """A matplotlib SVG made fit for the page: theme colours, page font, ids that start with ``prefix``, fluid width."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg)[^>]*?(viewBox="[^"]*")[^>]*>', r'\1 \2 aria-hidden="true">', svg, count=1)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r'(xlink:)?href="#([^"]+)"', rf'href="#{prefix}-\2"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    svg = re.sub(r"font: (?:(\d{3}|bold) )?([\d.]+)px [^;\"]+", _font, svg)
    svg = re.sub(r" font-family: [^;\"]+;| transform=\"rotate\(-0 [^\"]+\"", "", svg)
    for role, stand_in in STAND_IN.items():
        svg = svg.replace(stand_in, f"var(--{role})")
    left = set(re.findall(r"(?:fill|stroke): ?(#[0-9a-f]{3,6})", svg))
    assert not left, f"a chart was drawn with colours that are no roles: {left}"
    return svg


def _font(found: re.Match[str]) -> str:
    weight = f"font-weight: {found[1]}; " if found[1] else ""
    return f"{weight}font-size: {found[2]}px"
