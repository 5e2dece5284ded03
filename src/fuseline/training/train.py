"""`train`: from a configuration to a trained model, with everything around the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from fuseline.errors import InputError
from fuseline.timing import reset_peak_memory
from fuseline.training.config import TrainConfig, as_dict
from fuseline.training.determinism import deterministic
from fuseline.training.distributed import Group, joined
from fuseline.training.execution import find_execution
from fuseline.training.interruption import interruptible
from fuseline.training.loop import Loop
from fuseline.training.metrics import (
    METRICS,
    JsonLines,
    TensorBoard,
    WeightsAndBiases,
    Writer,
    check_installed,
)
from fuseline.training.preparation import prepared, settled
from fuseline.training.reporter import Reporter, Silent, TrainResult
from fuseline.training.run import Run


def train(
    config: TrainConfig,
    reporter: Reporter | None = None,
    *,
    folder: Path,
    device: str = "cpu",
    resume: bool = False,
    init_from: Path | None = None,
    cache_dir: Path | None = None,
) -> TrainResult:
    """Train a GPT as `config` says, in `folder`: metrics, checkpoints and the tokenizer are written there.

    Under `torchrun` every process calls this alike. Ctrl-C or SIGTERM stop after the step in hand and leave a
    checkpoint (outcome `interrupted`); a second one interrupts at once.

    Args:
        config: see `TrainConfig`; `auto` fields are decided for `device`.
        reporter: is told what happens, in the first process; nobody by default.
        folder: made if it is not there; must not hold a run, unless `resume`.
        device: `cpu`, `cuda`, `cuda:1`, ...
        resume: go on from the checkpoint in `folder`. In deterministic mode the losses are those, bit for
            bit, of a run that was never stopped.
        init_from: begin with the weights of this run, checkpoint or GPT-2.
        cache_dir: where corpora and tokens are kept; Fuseline's cache by default.

    Raises:
        InputError: something in the input, the folder or the machine's memory prevents it.
    """
    check_installed(["tensorboard"] * config.tensorboard + ["wandb"] * (config.wandb is not None))
    if resume and init_from is not None:
        raise InputError("A run is either resumed or begun from other weights: give one of the two.")
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(joined(device))
        folder = group.agreed(folder)  # its default name holds the time, which each process reads for itself
        interruption = stack.enter_context(interruptible())
        config, saved = settled(config, folder, group, resume=resume)
        compiled = find_execution(config.execution, group.device).backend is not None
        stack.enter_context(deterministic(config.deterministic, compiled=compiled))
        stack.enter_context(_explained(config, group))
        listener = reporter if reporter is not None and group.is_first else Silent()
        reset_peak_memory(group.device)
        run = prepared(
            config,
            folder,
            group,
            saved=saved,
            init_from=init_from,
            cache_dir=cache_dir,
            reporter=listener,
        )
        stack.callback(run.close)
        writers = _writers(run) if group.is_first else []
        for writer in writers:
            stack.callback(writer.close)
        return Loop(run, listener, writers, interruption).to_the_end()


def _writers(run: Run) -> Sequence[Writer]:
    writers: list[Writer] = [JsonLines(run.folder / METRICS)]
    if run.config.tensorboard:
        writers.append(TensorBoard(run.folder, run.taken))
    if run.config.wandb is not None:
        writers.append(WeightsAndBiases(run.config.wandb, run.folder, as_dict(run.config)))
    return writers


@contextlib.contextmanager
def _explained(config: TrainConfig, group: Group) -> Iterator[None]:
    """Turn torch's errors about memory and determinism into what the user can do about them."""
    try:
        yield
    except RuntimeError as error:
        if any(_is_about_memory(cause) for cause in _causes(error)):
            raise InputError(_does_not_fit(config, group)) from error
        if "deterministic" in str(error):
            first = str(error).splitlines()[0]
            raise InputError(
                f"Part of this model cannot run repeatably: {first} Train with --deterministic False."
            ) from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those behind it: running out of memory while a graph is recorded ends in another one."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_about_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _does_not_fit(config: TrainConfig, group: Group) -> str:
    device = group.device
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        place = f"{torch.cuda.get_device_name(device)} ({total:.0f} GiB)"
    else:
        place = "this machine's memory"
    told = (
        f"A micro-batch of {config.batch_size} sequences of {config.block_size} tokens did not fit in "
        f"{place}."
    )
    if config.batch_size == 1:
        return f"{told} Take a shorter --block-size or a smaller model."
    half = config.batch_size // 2
    return (
        f"{told} Try --batch-size {half} --accumulation {config.accumulation * config.batch_size // half}, "
        "which learns from as many sequences a step."
    )
