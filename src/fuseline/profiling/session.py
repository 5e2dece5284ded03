"""Profile the code inside `with fuseline.profile() as p:` as one step.

    for _ in range(3):
        train_step()                                  # compiles, fills caches
    with fuseline.profile(model, optimizer) as p:
        train_step()
    print(p)                                          # the tables
    p.save("my-profile")                              # page, traces, records

To profile several steps, call `p.step()` after each. Everything is recorded at once here, which slows the
host down. So the places of gaps are right, but not their lengths, and the shares of a CPU's ops, but not
their times. `profile_step` takes the step as a function and measures it without this.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.autograd.profiler import record_function

from fuseline.errors import InputError
from fuseline.profiling import saved
from fuseline.profiling.ceilings import measure
from fuseline.profiling.compiled import CompilationWatch, anything_compiled, compiler_in_use
from fuseline.profiling.difference import Difference, difference
from fuseline.profiling.explained import explain
from fuseline.profiling.memory import Tensors, peak_memory
from fuseline.profiling.places import modules_named
from fuseline.profiling.profile import GapRow, Profile, Row
from fuseline.profiling.recording import recorded
from fuseline.profiling.step import TRACE, assembled, step_device
from fuseline.profiling.trace import STEP
from fuseline.timing import summarize, synchronize

Write = Callable[[Profile, Path], Path]


class Session:
    """A profiled block. `profile` is available after the block has ended.

    Args:
        model, optimizer: the model's modules name the places, and the tensors of both tell kinds of memory
            apart. If torch.compile has compiled anything, modules are not named.
        device: the device to profile; by default the model's, or a GPU if there is one.
        write: how `save` writes; by default the data alone.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        device: torch.device | str | None = None,
        write: Write = saved.write,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._device = step_device(device, model)
        self._write = write
        self._stack = contextlib.ExitStack()
        self._profile: Profile | None = None
        self._times: list[float] = []
        self._range: record_function | None = None
        self._begun = 0.0

    def __enter__(self) -> Session:
        if self._profile is not None or self._range is not None:
            raise InputError("This profile was taken already. Make another with fuseline.profile().")
        self._before = Tensors.of(self._model, self._optimizer)
        self._watch = CompilationWatch() if compiler_in_use() else None
        if self._watch is not None:
            self._stack.enter_context(self._watch)
        self._stack.enter_context(modules_named(None if anything_compiled() else self._model))
        self._recording = self._stack.enter_context(recorded(self._device, detailed=True))
        self._begin_step()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end_step()
        self._stack.close()
        if kind is not None:
            return
        trace = self._recording.trace
        if len(trace.steps) > 1:
            # `step()` after the last step begins one in which nothing is done.
            kept = [
                s for s in trace.steps if any(s[0] <= c.begin < s[1] and not c.is_range for c in trace.calls)
            ]
            self._times = [t for t, s in zip(self._times, trace.steps, strict=False) if s in kept]
            trace.steps = kept
        fusions = self._watch.fusions if self._watch is not None else []
        taken = explain(trace, trace, fusions, on_gpu=self._device.type == "cuda")
        tf32 = torch.get_float32_matmul_precision() != "highest"
        self._profile = assembled(
            taken,
            self._device,
            measure(self._device, taken.dtypes(), tf32=tf32),
            step_ms=summarize(self._times),
            watch=self._watch,
            memory=peak_memory(trace, self._before, Tensors.of(self._model, self._optimizer)),
            files={TRACE: self._recording.file},
        )

    def step(self) -> None:
        """End one step and begin the next."""
        if self._range is None:
            raise InputError("step() tells steps apart inside `with fuseline.profile() as p:`.")
        self._end_step()
        self._begin_step()

    @property
    def profile(self) -> Profile:
        """The profile. Raises `InputError` before the block has ended."""
        if self._profile is None:
            raise InputError("There is no profile before `with fuseline.profile() as p:` has ended.")
        return self._profile

    def by_kind(self) -> list[Row]:
        """See `Profile.by_kind`."""
        return self.profile.by_kind()

    def by_kernel(self) -> list[Row]:
        """See `Profile.by_kernel`."""
        return self.profile.by_kernel()

    def gaps_by_place(self) -> list[GapRow]:
        """See `Profile.gaps_by_place`."""
        return self.profile.gaps_by_place()

    def compared(self, old: Session | Profile) -> Difference:
        """What changed from `old` to this."""
        return difference(old.profile if isinstance(old, Session) else old, self.profile)

    def save(self, folder: Path | str) -> Path:
        """Write page, traces and records into `folder`; returns the path of the page."""
        return self._write(self.profile, Path(folder))

    def __str__(self) -> str:
        return str(self.profile)

    def _begin_step(self) -> None:
        self._begun = time.perf_counter()
        self._range = record_function(STEP)
        self._range.__enter__()

    def _end_step(self) -> None:
        if self._range is not None:
            synchronize(self._device)
            self._range.__exit__(None, None, None)
            self._times.append((time.perf_counter() - self._begun) * 1e3)
            self._range = None
