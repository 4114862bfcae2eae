"""Figures as a table for people: a row for each measure, a column for each arm, and what may not be quoted marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reporting import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

Columns = Mapping[str, Mapping[str, Figure]]
"""Figures by measure, by the heading of their column."""


def print_table(title: str, columns: Columns, groups: Mapping[str, Sequence[str]], console: Console) -> None:
    """The measures of `groups` (by heading), with half their range over the passes; those without a figure are left
    out.
    """
    table = Table(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", style="dim", no_wrap=True)
    for heading, names in groups.items():
        rows = [name for name in names if any(name in figures for figures in columns.values())]
        if not rows:
            continue
        table.add_row(Text(heading, style="bold cyan"))
        for name in rows:
            _add_row(table, name, [figures.get(name) for figures in columns.values()])
        table.add_section()
    console.print(Text(title, style="bold"))
    console.print(table)
    unsure = [figure for figures in columns.values() for figure in figures.values() if not figure.reportable]
    if unsure:
        note = f"[yellow]~[/] not reportable ({len(unsure)} figures): the passes disagree, or there is only one"
        console.print(note, highlight=False)


def _add_row(table: Table, name: str, figures: Sequence[Figure | None]) -> None:
    measured = [figure for figure in figures if figure is not None and figure.unit != "ratio"]
    in_ms = any(figure.unit.startswith("s") for figure in measured) and all(
        figure.unit in ("s", "s/step") and figure.value < 1 for figure in measured
    )
    cells = [_cell(figure, 1000 if in_ms and figure in measured else 1) for figure in figures]
    unit = next((figure.unit for figure in measured), "ratio")
    table.add_row(Text(f"  {name.replace('_', ' ')}"), *cells, f"m{unit}" if in_ms else unit)


def _cell(figure: Figure | None, factor: float) -> Text:
    if figure is None:
        return Text("")
    text = Text(f"{figure.value:.1%} " if figure.unit.startswith("of ") else f"{_number(figure.value * factor)} ")
    half_range = (figure.spread.max - figure.spread.min) / 2
    # As wide with a range as without, so that the digits stand below each other.
    text.append(f"±{half_range / abs(figure.value):<4.0%}" if half_range and figure.value else " " * 5, style="dim")
    text.append(" " if figure.reportable else "~", style="yellow")
    return text


def _number(value: float) -> str:
    """Three significant digits at least, and whole numbers whole."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if abs(value) >= 0.001 else f"{value:.1e}"
