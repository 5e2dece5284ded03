"""An LSTM cell three ways, timed: Python operators, C++ over ATen, C++ with a CUDA kernel for the pointwise
half.

    python examples/custom_op/lstm_cell.py
    python examples/custom_op/lstm_cell.py --out results    # the same, kept as records

The table is that of PyTorch's tutorial on C++ and CUDA extensions, over the standard LSTM cell. All three
have the same parameters and numbers, and take turns. Without a GPU or nvcc the CUDA row is left out, and
without a C++ compiler that row too, with the reason.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from fuseline import native
from fuseline.records import Record, append, describe
from fuseline.records.record import Scalar
from fuseline.timing import paired_ratio, summarize, time_steps

HERE = Path(__file__).parent
WAYS = ("python", "cpp", "cuda")
PEERS = {"python": "python", "cpp": "aten", "cuda": "fuseline"}
"""The ways as records name them."""


def missing(way: str, device: torch.device) -> str | None:
    """Why a way cannot run here; None if it can."""
    search = native.compilers()
    if way != "python" and search["cxx"].compiler is None:
        return f"{search['cxx'].reason}; {search['cxx'].mend}"
    if way == "cuda" and device.type != "cuda":
        return "there is no CUDA device"
    if way == "cuda" and search["nvcc"].compiler is None:
        return f"{search['nvcc'].reason}; {search['nvcc'].mend}"
    return None


def load_operators() -> Any:
    """`torch.ops.lstm_example`, compiled at the first call; with the kernels where they can run."""
    cuda = torch.cuda.is_available() and native.compilers()["nvcc"].compiler is not None
    return native.build_extension(
        "lstm_example",
        cpp_sources=[HERE / "lstm_cell.cpp"],
        cuda_sources=[HERE / "lstm_cell.cu"] if cuda else [],
    )


class LSTMCell(torch.nn.Module):
    """A standard LSTM cell. `way` is `python`, `cpp` or `cuda`.

    weight is [4 * width, inputs + width], gates in the order i, f, g, o (torch.nn.LSTMCell's), bias [4 *
    width].
    """

    def __init__(self, inputs: int, width: int, way: str) -> None:
        super().__init__()
        self.way = way
        bound = 1.0 / math.sqrt(width)
        self.weight = torch.nn.Parameter(torch.empty(4 * width, inputs + width).uniform_(-bound, bound))
        self.bias = torch.nn.Parameter(torch.empty(4 * width).uniform_(-bound, bound))
        if way != "python":
            load_operators()

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, inputs], h and c [B, width] to the next h and c."""
        if self.way != "python":
            return torch.ops.lstm_example.cell(x, h, c, self.weight, self.bias, self.way == "cuda")
        gates = F.linear(torch.cat((x, h), dim=1), self.weight, self.bias)
        i, f, g, o = gates.chunk(4, dim=1)
        c_next = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c_next), c_next


Times = dict[str, list[float]]
"""Microseconds of each run, by direction."""


def time_cells(
    cells: dict[str, LSTMCell], x: Tensor, h: Tensor, c: Tensor, calls: int, runs: int
) -> dict[str, Times]:
    """By way: a forward, and the backward of its sums, over a graph that is kept. The ways take turns."""

    def forward(cell: LSTMCell) -> tuple[Tensor, Tensor]:
        return cell(x, h, c)

    backwards = {}
    for way, cell in cells.items():
        h_next, c_next = forward(cell)
        backwards[way] = partial(torch.autograd.backward, (h_next.sum() + c_next.sum(),), retain_graph=True)
    for way, cell in cells.items():
        for call in (partial(forward, cell), backwards[way]):
            time_steps(call, x.device, steps=max(3, calls // 10))
    taken: dict[str, Times] = {way: {"fw": [], "bw": []} for way in cells}
    for run in range(runs):
        for way in cells if run % 2 == 0 else reversed(list(cells)):
            for direction, call in (("fw", partial(forward, cells[way])), ("bw", backwards[way])):
                taken[way][direction].append(1e3 * time_steps(call, x.device, steps=calls))
    return taken


def records(taken: dict[str, Times], case: dict[str, Scalar], device: torch.device) -> list[Record]:
    """Each way's times, and those of Python over the others' in the same run."""
    environment = describe(device)
    found = []
    for way, times in taken.items():
        for direction, samples in times.items():
            place = {**case, "op": "lstm_cell", "direction": direction, "captured": False, "section": "lstm"}
            took = summarize(samples)
            figures = [("time_us", took)]
            if way != "python":
                figures.append(("paired_speedup", paired_ratio(taken["python"][direction], samples)))
            for metric, figure in figures:
                value = figure.median if metric == "time_us" else figure.value
                ends = {"low": figure.low, "high": figure.high, "n": figure.n}
                found.append(Record.of("ops", place, metric, value, environment, peer=PEERS[way], **ends))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--inputs", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--calls", type=int, default=300, help="calls to one synchronization")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--out", type=Path, help="folder for records (ops.jsonl)")
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(options.batch, options.inputs, device=device)
    h, c = (torch.randn(options.batch, options.width, device=device) for _ in range(2))
    console = Console()
    cells = {}
    for way in WAYS:
        reason = missing(way, device)
        if reason is None:
            cells[way] = LSTMCell(options.inputs, options.width, way).to(device)
        else:
            console.print(f"Going without {way}: {reason}.")
    taken = time_cells(cells, x, h, c, options.calls, options.runs)
    table = Table(title=f"LSTM cell on {device.type}: batch {options.batch}, width {options.width}, fp32")
    for name in ("way", "forward us", "95%", "backward us", "95%"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for way, times in taken.items():
        found = [summarize(times[direction]) for direction in ("fw", "bw")]
        numbers = [(f"{s.median:.1f}", f"{s.low:.1f} .. {s.high:.1f}") for s in found]
        table.add_row(way, *(text for pair in numbers for text in pair))
    console.print(table)
    if options.out is not None:
        case: dict[str, Scalar] = {"dtype": "float32", "rows": options.batch, "n": options.width}
        append(options.out / "ops.jsonl", records(taken, case, device))
        console.print(f"Records: {options.out / 'ops.jsonl'}")


if __name__ == "__main__":
    main()
