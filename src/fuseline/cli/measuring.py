"""The bar that benchmarks move while they measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def measuring(width: int) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr; yields `observe(what, done, total)`. `width`: characters that `what` has at most."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    name = TextColumn(f"{{task.description:<{width}}}")
    columns = (name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None)

        def observe(now: str, done: int, total: int) -> None:
            progress.update(task, description=now[:width], completed=done, total=total)

        yield observe
