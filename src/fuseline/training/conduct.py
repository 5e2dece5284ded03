"""What surrounds every training run, whatever it trains: processes, signals, determinism, writers, errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from fuseline.errors import InputError
from fuseline.timing import ran_out_of_memory, reset_peak_memory
from fuseline.training.determinism import deterministic
from fuseline.training.distributed import Group, joined
from fuseline.training.execution import find_execution
from fuseline.training.folder_lock import held
from fuseline.training.interruption import interruptible
from fuseline.training.loop import Loop, LoopRun
from fuseline.training.metrics import (
    METRICS,
    JsonLines,
    TensorBoard,
    WeightsAndBiases,
    Writer,
    check_installed,
)
from fuseline.training.reporter import Reporter, Silent, TrainResult


class RunConfig(Protocol):
    """What is asked of a configuration here. It is a dataclass besides."""

    @property
    def execution(self) -> str: ...
    @property
    def deterministic(self) -> bool | None: ...
    @property
    def tensorboard(self) -> bool: ...
    @property
    def wandb(self) -> str | None: ...


C = TypeVar("C", bound=RunConfig)
R = TypeVar("R", bound=LoopRun)


def check_writers(config: RunConfig) -> None:
    """`InputError` if a package that `config` wants figures written by is not installed."""
    check_installed(["tensorboard"] * config.tensorboard + ["wandb"] * (config.wandb is not None))


def conduct(
    reporter: Reporter | None,
    *,
    folder: Path,
    device: str,
    settle: Callable[[Path, Group], C],
    prepare: Callable[[C, Path, Group, Reporter], R],
    too_large: Callable[[C, Group], str],
    writers: Callable[[R], Sequence[Writer]] = lambda run: (),
    afterwards: Callable[[R, TrainResult], None] = lambda run, result: None,
) -> TrainResult:
    """Take a run from its configuration to its end, in every process alike.

    Args:
        settle: decides what the configuration leaves open.
        prepare: makes the run, fresh or from its checkpoint.
        too_large: what to say if memory runs out.
        writers: further writers of figures, in the first process.
        afterwards: what is left to do when the training has ended.

    Ctrl-C or SIGTERM before the first step raise `KeyboardInterrupt`. Later they stop after the step in hand
    and leave a checkpoint (outcome `interrupted`); a second one interrupts at once. Raises `InputError` for
    what the user can mend.
    """
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(joined(device))
        folder = group.agreed(folder)  # its default name holds the time, which each process reads for itself
        group.first(lambda: stack.enter_context(held(folder)))
        interruption = stack.enter_context(interruptible())
        config = settle(folder, group)
        compiled = find_execution(config.execution, group.device).backend is not None
        stack.enter_context(deterministic(bool(config.deterministic), compiled=compiled))
        stack.enter_context(_explained(lambda: too_large(config, group)))
        listener = reporter if reporter is not None and group.is_first else Silent()
        reset_peak_memory(group.device)
        run = prepare(config, folder, group, listener)
        stack.callback(run.close)
        told = [*_writers(run, config), *writers(run)] if group.is_first else []
        for writer in told:
            stack.callback(writer.close)
        result = Loop(run, listener, told, interruption).to_the_end()
        afterwards(run, result)
        return result


def device_name(device: torch.device) -> str:
    """The device with its memory, to name it in a message."""
    if device.type != "cuda":
        return "this machine's memory"
    total = torch.cuda.get_device_properties(device).total_memory / 2**30
    return f"{torch.cuda.get_device_name(device)} ({total:.0f} GiB)"


def _writers(run: LoopRun, config: RunConfig) -> list[Writer]:
    writers: list[Writer] = [JsonLines(run.folder / METRICS)]
    if config.tensorboard:
        writers.append(TensorBoard(run.folder, run.taken))
    if config.wandb is not None:
        writers.append(WeightsAndBiases(config.wandb, run.folder, _plain(config)))
    return writers


def _plain(config: Any) -> Mapping[str, Any]:
    return asdict(config)


@contextlib.contextmanager
def _explained(too_large: Callable[[], str]) -> Iterator[None]:
    """Turn torch's errors about memory and determinism into what the user can do about them."""
    try:
        yield
    except RuntimeError as error:
        if ran_out_of_memory(error):
            raise InputError(too_large()) from error
        if "deterministic" in str(error):
            first = str(error).splitlines()[0]
            raise InputError(
                f"Part of this model cannot run repeatably: {first} Train with --deterministic False."
            ) from error
        raise
