"""Progress bars for the two long waits, loading weights and compiling steps; silent where there is no terminal."""

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
def load_progress(console: Console) -> Iterator[Callable[["LoadProgress"], None]]:
    """A bar of parameters while weights load."""
    columns = (TextColumn("loading"), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
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
