"""Profile a training or decoding step: whatever `step()` does, once it is warm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch
from torch import nn

from fuseline.errors import InputError
from fuseline.profiling.ceilings import Ceilings, measure
from fuseline.profiling.compiled import CompilationWatch, anything_compiled, compiler_in_use
from fuseline.profiling.explained import Explained, explain
from fuseline.profiling.memory import PeakMemory, Tensors, peak_memory
from fuseline.profiling.profile import Profile
from fuseline.profiling.recording import Step, record_details, record_times
from fuseline.records import describe
from fuseline.records.record import Scalar
from fuseline.timing import Summary, summarize, synchronize, time_steps

WARM_UP = 4  # a compiled step compiles in the first, records its CUDA graph in the second
TRACE, DETAILED = "trace.json.gz", "trace-ops.json.gz"
Observer = Callable[[str], None]
"""Called with what is being done now."""


def profile_step(
    step: Step,
    device: torch.device | str | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    unrecorded: Step | None = None,
    name_modules: bool | None = None,
    case: Mapping[str, Scalar] | None = None,
    precision: str | None = None,
    steps: int = 5,
    warm_up: int = WARM_UP,
    ceilings: Ceilings | None = None,
    memory: bool = True,
    observe: Observer = lambda what: None,
) -> Profile:
    """Warm up `step`, time it by the clock, then record `steps` steps and one more in detail.

    Args:
        step: a function without arguments that takes one step and does not wait for the device.
        device: the device it runs on; by default the model's, or a GPU if there is one.
        model, optimizer: the model's modules name the places of a step that is not compiled, and the tensors
            of both tell kinds of memory apart.
        unrecorded: if `step` replays a CUDA graph, the same step launched kernel by kernel. A replayed graph
            shows only names of kernels; this step shows which op launched each.
        name_modules: whether to name modules, which needs modules that run one by one, not compiled code.
            None: yes, unless something was compiled in this process.
        case: a description of what runs, for the records.
        precision: `fp32` if fp32 products are computed in full, any other name if in TF32; by default as
            torch is set now.
        ceilings: earlier measured ceilings; measured here by default.
        memory: whether to record the allocator, too.
        observe: called with a line about each thing as it is done.

    Raises `InputError` if the device did nothing in the step.
    """
    place = step_device(device, model)
    observe("warming up")
    watch = CompilationWatch() if compiler_in_use() else None
    with watch or contextlib.nullcontext():
        for _ in range(max(1, warm_up)):
            step()
        synchronize(place)
    observe("timing")
    clock = _by_the_clock(step, place)
    observe("recording")
    timed = record_times(step, place, steps)
    detailed_step = unrecorded or step
    if unrecorded is not None:
        for _ in range(2):
            unrecorded()
    observe("recording in detail")
    before = Tensors()

    def look() -> None:
        nonlocal before
        before = Tensors.of(model, optimizer)

    named = not anything_compiled() if name_modules is None else name_modules
    detailed = record_details(detailed_step, place, model if named else None, before=look)
    fusions = tuple(watch.fusions) if watch is not None else ()
    taken = explain(timed.trace, detailed.trace, fusions, on_gpu=place.type == "cuda")
    observe("measuring the ceilings")
    tf32 = torch.get_float32_matmul_precision() != "highest" if precision is None else precision != "fp32"
    known = ceilings or measure(place, taken.dtypes(), tf32=tf32)
    return assembled(
        taken,
        place,
        known,
        step_ms=clock,
        case=case,
        watch=watch,
        memory=peak_memory(detailed.trace, before, Tensors.of(model, optimizer)) if memory else None,
        files={TRACE: timed.file, DETAILED: detailed.file},
    )


def assembled(
    taken: Explained,
    device: torch.device,
    ceilings: Ceilings,
    *,
    step_ms: Summary,
    case: Mapping[str, Scalar] | None = None,
    watch: CompilationWatch | None = None,
    memory: PeakMemory | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Profile:
    """The profile of what was explained, with its floors."""
    return Profile(
        dict(case or {}),
        str(device),
        describe(device),
        step_ms,
        tuple(taken.entries(ceilings)),
        tuple(taken.gaps()),
        tuple(taken.samples()),
        ceilings,
        () if watch is None else tuple(watch.fusions),
        () if watch is None else tuple(watch.graph_breaks),
        () if watch is None else tuple(watch.recompilations),
        memory,
        tuple(taken.notes),
        dict(files or {}),
    )


def step_device(device: torch.device | str | None, model: nn.Module | None) -> torch.device:
    """The named device, or the model's, or a GPU if there is one. Raises `InputError` for a GPU that is not
    there."""
    if device is not None:
        place = torch.device(device)
        if place.type == "cuda" and not torch.cuda.is_available():
            raise InputError(
                f"The step is to run on {place}, and torch sees no CUDA device here. Use device='cpu'."
            )
        return place
    if model is not None:
        for parameter in model.parameters():
            return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _by_the_clock(step: Step, device: torch.device) -> Summary:
    """Milliseconds of a step, over runs of several steps: half a second of runs, but at least two."""
    one = time_steps(step, device, steps=1)
    each = max(1, min(20, int(100 / max(one, 0.01))))
    return summarize([time_steps(step, device, steps=each) for _ in range(5)])
