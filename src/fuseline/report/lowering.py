"""The page of a compilation: a section for each compiler, with what it hands on to the next."""

from __future__ import annotations

from pathlib import Path

from fuseline.profiling.lowering import Lowered, Stage
from fuseline.profiling.lowering_text import STAGES, TOOLS, counted, summary
from fuseline.records import Record
from fuseline.report import page
from fuseline.report.blocks import Block, Cell, Column, Details, Headline, Row, Section, Words, table
from fuseline.report.numbers import plain
from fuseline.report.selection import Shelf

SUMMARIES = {
    "TorchDynamo": "captures a graph of torch's operations from Python bytecode, and guards it",
    "AOTAutograd": "traces the backward ahead of time, and divides the joint graph",
    "TorchInductor": "fuses, and writes kernels and the code that calls them",
    "Triton": "compiles a kernel for the GPU",
}


def save(lowered: Lowered, folder: Path) -> Path:
    """Write the page, `index.html`, into `folder`, which is made. Returns its path. Raises `InputError` if it
    cannot be written."""
    html = page.render(
        Shelf([record_of(lowered)]), sections(lowered), title_of(lowered), beside="what the compilers say"
    )

    def write(made: Path) -> None:
        (made / "index.html").write_text(html, encoding="utf-8")

    page.write_whole(folder, write)
    return folder / "index.html"


def title_of(lowered: Lowered) -> str:
    return f"What torch.compile does to {lowered.name}"


def record_of(lowered: Lowered) -> Record:
    """The seconds that the first call took."""
    case = {"model": lowered.name, "section": "lowering"}
    return Record.of("profile", case, "compile_s", lowered.seconds, lowered.environment, peer="inductor")


def sections(lowered: Lowered) -> list[Section]:
    """One for the source, and one for each compiler that had something to do."""
    found = [_source(lowered)]
    for tool in TOOLS:
        blocks: list[Block] = []
        for key, told in STAGES.items():
            stages = lowered.of(key) if told.tool == tool else []
            if stages:
                blocks += [
                    Words(told.words),
                    *(_details(stage, told.heading, at, len(stages)) for at, stage in enumerate(stages)),
                ]
        if tool == "TorchInductor":
            blocks = [*_fusions(lowered), *blocks]
        if tool == "TorchDynamo":
            blocks += [
                Details(f"Graph break at {broken.place}", (("", broken.reason),), unfolded=True)
                for broken in lowered.graph_breaks
            ]
        if blocks:
            found.append(Section(tool.lower(), tool, SUMMARIES[tool], SUMMARIES[tool], tuple(blocks)))
    return found


def _source(lowered: Lowered) -> Section:
    blocks: list[Block] = [
        Headline(
            counted(len(lowered.fusions), "kernel call"),
            summary(lowered),
            (("first call, compiling included", f"{plain(lowered.seconds)} s", ""),),
        )
    ]
    if lowered.source:
        blocks.append(Details("The forward function", (("", lowered.source),), verbatim=True, unfolded=True))
    words = "the model as it is written"
    return Section("source", "The source", words, words, tuple(blocks))


def _details(stage: Stage, heading: str, at: int, of: int) -> Details:
    number = f", {at + 1} of {of}" if of > 1 else ""
    size = f": {counted(stage.operations, 'operation')}" if stage.operations is not None else ""
    return Details(
        f"{heading}{number}{size}",
        (("", stage.text),),
        verbatim=True,
        # Guards and PTX are long and read by few.
        unfolded=stage.key not in ("guards", "ptx"),
    )


def _fusions(lowered: Lowered) -> list[Block]:
    rows = [
        Row(
            (
                Cell(one.kernel, "written by inductor" if one.is_generated else "a library's"),
                Cell(", ".join(one.operations)),
                Cell(f"{one.bytes:,}" if one.bytes is not None else ""),
            )
        )
        for one in lowered.fusions
    ]
    columns = (
        Column("kernel", numeric=False),
        Column("ATen operations in it", numeric=False),
        Column("bytes that it must move"),
    )
    made = table("What is in each kernel", columns, rows, "inductor's own account of what it fused")
    return [] if made is None else [made]
