"""Every registered op, at row lengths and dtypes, against its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fuseline import native
from fuseline.bench.ops.bound import Computation, bind_inputs
from fuseline.bench.ops.measure import Effort, measure_case
from fuseline.bench.ops.results import SUITE, case_records, copy_record, dtype_name, host_record, skip_record
from fuseline.bench.peers import PEERS, Peer, find_peers
from fuseline.errors import InputError, unknown_name
from fuseline.ops import Case, Op, get, registered
from fuseline.records import Record, append, describe
from fuseline.records.record import Scalar
from fuseline.timing import copy_bandwidth_gbs, host_time_us

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HOST_SHAPE = (8, 1024)

Observer = Callable[[str, int, int], None]
"""Called with what is measured now, cases done, and cases in all."""


@dataclass(frozen=True)
class OpsBench:
    """What to measure.

    `elements` maps a dtype's name to the elements of a matrix; a case is elements/n rows of length n.
    """

    device: torch.device
    lengths: tuple[int, ...]
    elements: dict[str, int]
    effort: Effort
    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    peers: tuple[str, ...] = tuple(PEERS)
    seed: int = 1337

    def __post_init__(self) -> None:
        for name in self.dtypes:
            if name not in DTYPES:
                raise unknown_name("dtype", name, DTYPES)
        for n in self.lengths:
            if n < 1:
                raise InputError(
                    f"A row of length {n} has nothing in it: --lengths takes whole numbers from 1."
                )
        if not self.dtypes or not self.lengths or not self.contenders:
            raise InputError("Nothing to measure: name at least one dtype, one length and one peer.")
        for name in self.ops:
            get(name)

    @property
    def contenders(self) -> tuple[Peer, ...]:
        return find_peers(self.peers)

    def cases(self) -> Iterator[tuple[Op, torch.dtype, Case]]:
        """All that is measured, in order."""
        for op in map(get, self.ops) if self.ops else registered():
            for name in self.dtypes:
                for n in self.lengths:
                    rows = max(1, self.elements[name] // n)
                    yield op, DTYPES[name], Case(f"{rows}x{n}", (rows, n))


def run(bench: OpsBench, out: Path, observe: Observer) -> list[Record]:
    """Measure everything; returns the records, which are appended to `<out>/ops.jsonl` case by case."""
    is_native = native.ready(bench.device.type)
    file = out / f"{SUITE}.jsonl"
    records: list[Record] = []

    def keep(new: list[Record]) -> None:
        append(file, new)
        records.extend(new)

    cases = list(bench.cases())
    observe("copy bandwidth", 0, len(cases))
    copy_gbs = copy_bandwidth_gbs(bench.device)
    environment = describe(bench.device)
    keep([copy_record(copy_gbs, environment)])
    reasons = {peer.name: peer.why_not(bench.device) for peer in bench.contenders}
    here = [peer for peer in bench.contenders if reasons[peer.name] is None]
    for peer in bench.contenders:
        if reason := reasons[peer.name]:
            keep([skip_record(peer, reason, {"op": "all"}, environment)])
    before: tuple[Op, torch.dtype] | None = None
    for number, (op, dtype, case) in enumerate(cases):
        rows, n = case.shape
        observe(f"{op.name} {dtype_name(dtype)} {rows} x {n}", number, len(cases))
        results = measure_case(op, case, dtype, here, bench.device, bench.seed, bench.effort)
        flat: dict[str, Scalar] = {"op": op.name, "dtype": dtype_name(dtype), "native": is_native}
        keep(case_records(results, {**flat, "rows": rows, "n": n}, copy_gbs, describe(bench.device)))
        if bench.device.type == "cuda" and (op, dtype) != before:
            able = [result.peer for result in results if result.skipped is None]
            keep(_host_records(bench, op, dtype, able, flat))
            before = op, dtype
    observe("done", len(cases), len(cases))
    return records


def _host_records(
    bench: OpsBench, op: Op, dtype: torch.dtype, peers: list[Peer], flat: dict[str, Scalar]
) -> list[Record]:
    """The host's time for one forward call of each peer, at a shape that the device is done with at once."""
    rows, n = HOST_SHAPE
    bound = bind_inputs(op, Case("host", HOST_SHAPE), dtype, bench.device, bench.seed)
    environment = describe(bench.device)
    records = []
    for peer in peers:
        with torch.no_grad():
            host_us = host_time_us(Computation.of(peer, bound).forward, bench.device)
        records.append(host_record(peer, host_us, {**flat, "rows": rows, "n": n}, environment))
    torch.compiler.reset()
    return records
