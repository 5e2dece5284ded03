"""The tables of `fuseline inspect`: kernel templates, instances, one kernel in full."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from fuseline.inspection import Gpu, Kernel, Kernels, Occupancy

COLUMNS = ("threads", "registers", "shared", "local", "constants", "blocks", "occupancy")
UNKNOWN = "?"


@dataclass(frozen=True)
class View:
    """How kernels are looked at: the GPU, the threads of a block (None: what launch bounds allow), bytes of
    dynamic shared memory."""

    gpu: Gpu
    threads: int | None = None
    shared: int = 0

    def occupancy(self, kernel: Kernel) -> Occupancy | None:
        return kernel.occupancy(self.gpu, threads=self.threads, shared=self.shared)

    def families(self, kernels: Iterable[Kernel], sort: str) -> Table:
        """A line a template, each figure from the lowest to the highest of its instances."""
        groups = defaultdict(list)
        for kernel in self._sorted(kernels, sort):
            groups[kernel.family].append(kernel)
        table = _table("kernel", "instances", *COLUMNS, "limited by")
        for name, instances in groups.items():
            figures = [self._figures(kernel) for kernel in instances]
            ranges = [_range([one[column] for one in figures], column) for column in COLUMNS]
            limits = dict.fromkeys(self._limits(kernel) for kernel in instances)
            table.add_row(name, f"{len(instances):,}", *ranges, "; ".join(filter(None, limits)))
        return table

    def instances(self, kernels: Iterable[Kernel], sort: str) -> Table:
        """A line a kernel."""
        table = _table("kernel", *COLUMNS, "limited by")
        for kernel in self._sorted(kernels, sort):
            figures = self._figures(kernel)
            table.add_row(
                kernel.name, *(_range([figures[column]], column) for column in COLUMNS), self._limits(kernel)
            )
        return table

    def card(self, kernel: Kernel) -> str:
        """One kernel in full, with what each resource would let run."""
        resources, bounds = kernel.resources, kernel.bounds
        by_bounds = (
            "no launch bounds" if bounds.threads is None else f"{bounds.threads:,} at most (launch bounds)"
        )
        lines = [
            ("code", resources.architecture),
            ("registers", f"{resources.registers} a thread"),
            ("shared memory", f"{kernel.shared:,} bytes a block, static"),
            (
                "local memory",
                f"{resources.local:,} bytes a thread (spilled registers, arrays indexed at run time)",
            ),
            ("constants", f"{resources.constants:,} bytes, parameters among them"),
            ("named barriers", str(bounds.barriers)),
            ("threads a block", by_bounds),
        ]
        text = [kernel.name, resources.function, "", *(f"  {name:<17}{value}" for name, value in lines)]
        found = self.occupancy(kernel)
        return "\n".join(text if found is None else [*text, "", *self._explained(kernel, found)])

    def remark(self, kernels: Sequence[Kernel]) -> str:
        """What the figures leave out."""
        remarks = []
        if not self.shared:
            remarks.append(
                "Shared memory is what the source declares. What launchers add is not in the library: it "
                "lowers the occupancy of kernels that take it; give it as --shared BYTES."
            )
        if self.threads is None and any(kernel.bounds.threads is None for kernel in kernels):
            remarks.append(
                f"{UNKNOWN}: the kernel has no launch bounds; give the threads of a block as --threads N."
            )
        return "\n".join(remarks)

    def _explained(self, kernel: Kernel, found: Occupancy) -> Iterable[str]:
        from fuseline.inspection.occupancy import fewer_registers

        added = f" and {self.shared:,} bytes of dynamic shared memory" if self.shared else ""
        yield f"  Blocks of {found.threads:,} threads{added} on a multiprocessor of {self.gpu.name}:"
        for name, blocks in found.limits.items():
            yield f"    {name:<15}{blocks:>5}{'  <- the limit' if name in found.limited_by else ''}"
        if not found.blocks:
            yield "  None fits: a launch fails."
            return
        warps = f"{found.warps} of {self.gpu.warps} warps"
        yield f"  {found.blocks} at once: {warps}, an occupancy of {found.share:.0%}."
        if found.limited_by == ("registers",):
            most = fewer_registers(self.gpu, found.threads, found.blocks + 1)
            own = kernel.resources.registers
            yield f"  One more would fit with {most} registers a thread; this has {own}."

    def _figures(self, kernel: Kernel) -> dict[str, float | None]:
        found, resources = self.occupancy(kernel), kernel.resources
        return {
            "threads": self.threads or kernel.bounds.threads,
            "registers": resources.registers,
            "shared": kernel.shared,
            "local": resources.local,
            "constants": resources.constants,
            "blocks": None if found is None else found.blocks,
            "occupancy": None if found is None else found.share,
        }

    def _limits(self, kernel: Kernel) -> str:
        found = self.occupancy(kernel)
        return "" if found is None else ", ".join(found.limited_by)

    def _sorted(self, kernels: Iterable[Kernel], sort: str) -> list[Kernel]:
        """`kernels` stand by name, which decides between equals."""

        def share(kernel: Kernel) -> float:
            found = self.occupancy(kernel)
            return 2.0 if found is None else found.share  # last

        keys: dict[str, Callable[[Kernel], float]] = {
            "name": lambda kernel: 0,
            "occupancy": share,
            "registers": lambda kernel: -kernel.resources.registers,
            "shared": lambda kernel: -kernel.shared,
            "local": lambda kernel: -kernel.resources.local,
        }
        return sorted(kernels, key=keys[sort])


def total(kernels: Sequence[Kernel]) -> str:
    """A line that sums the list up."""
    templates = len({kernel.family for kernel in kernels})
    local = sum(kernel.resources.local > 0 for kernel in kernels)
    most = max(kernel.resources.registers for kernel in kernels)
    return (
        f"Total: {len(kernels):,} kernels of {templates:,} {'templates' if templates > 1 else 'template'}; "
        f"{local:,} with local memory; at most {most} registers."
    )


def as_json(known: Kernels, chosen: Iterable[Kernel], *, threads: int | None, shared: int) -> dict[str, Any]:
    """The figures as numbers, a kernel an entry."""
    view = View(known.gpu, threads, shared)
    return {
        "gpu": known.gpu.name,
        "library": str(known.library),
        "remark": known.remark,
        "dynamic_shared": shared,
        "kernels": [
            {
                "name": kernel.name,
                "function": kernel.resources.function,
                "architecture": kernel.resources.architecture,
                **view._figures(kernel),
                "barriers": kernel.bounds.barriers,
                "limits": None if (found := view.occupancy(kernel)) is None else found.limits,
                "limited_by": [] if found is None else list(found.limited_by),
            }
            for kernel in chosen
        ],
    }


def _table(*names: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in names:
        is_text = name in ("kernel", "limited by")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    return table


def _range(values: Sequence[float | None], column: str) -> str:
    """The lowest and the highest, one where they are equal."""
    known = [value for value in values if value is not None]
    form = "{:.0%}" if column == "occupancy" else "{:,}"
    ends = dict.fromkeys(form.format(end) for end in (min(known), max(known))) if known else {}
    return " to ".join(ends) if len(known) == len(values) or known else UNKNOWN
