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
    """The measures of `groups` (by heading), with half their range over the passes; those without a figure are left out."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", style="dim", no_wrap=True)
    for heading, names in groups.items():
        rows = [name for name in names if any(name in figures for figures in columns.values())]
        if not rows:
            continue
        table.add_section()
        table.add_row(Text(heading, style="bold cyan"))
        for name in rows:
            found = [figures.get(name) for figures in columns.values()]
            unit = next(figure.unit for figure in found if figure is not None)
            table.add_row(Text(f"  {name.replace('_', ' ')}"), *map(_cell, found), unit)
    console.print(Text(title, style="bold"))
    console.print(table)
    unsure = [figure for figures in columns.values() for figure in figures.values() if not figure.reportable]
    if unsure:
        note = f"[yellow]~[/] not reportable ({len(unsure)} figures): the passes disagree, or there is only one"
        console.print(note, highlight=False)


def _cell(figure: Figure | None) -> Text:
    if figure is None:
        return Text("")
    text = Text(_number(figure.value))
    disagreement = (figure.spread.max - figure.spread.min) / 2
    text.append(f" ±{disagreement / abs(figure.value):4.0%}" if disagreement and figure.value else " " * 6, style="dim")
    text.append("~" if not figure.reportable else " ", style="yellow")
    return text


def _number(value: float) -> str:
    """Three significant digits, and whole numbers whole."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1e}"
