"""Progress bars for the long waits: weights, compiling steps, scoring a text; silent where there is no terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from models import LoadProgress

CompileProgress = Callable[[int, object], None]
"""(shapes done, the shape that is next)"""


@contextmanager
def load_progress(console: Console, what: str = "loading") -> Iterator[Callable[["LoadProgress"], None]]:
    """A bar of parameters while weights load, or are written."""
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def update(loaded: "LoadProgress") -> None:
            bar.update(task, completed=loaded.done, total=loaded.total, description=loaded.parameter)

        yield update


@contextmanager
def compile_progress(console: Console, shapes: int) -> Iterator[CompileProgress]:
    """A bar of shapes while steps compile."""
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=shapes)

        def update(done: int, shape: object) -> None:
            bar.update(task, completed=done)

        yield update


@contextmanager
def score_progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar of windows while a text is scored: (windows done, of how many)."""
    columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield update
