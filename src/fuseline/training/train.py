"""`train`: from a configuration to a trained model, with everything around the loop."""

from __future__ import annotations

from pathlib import Path

from fuseline.errors import InputError
from fuseline.training.checkpoint import Checkpoint
from fuseline.training.conduct import check_writers, conduct, device_name
from fuseline.training.config import TrainConfig
from fuseline.training.distributed import Group
from fuseline.training.preparation import prepared, settled
from fuseline.training.reporter import Reporter, TrainResult
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

    Under `torchrun` every process calls this alike. Ctrl-C or SIGTERM before the first step raise
    `KeyboardInterrupt`. Later they stop after the step in hand and leave a checkpoint (outcome
    `interrupted`); a second one interrupts at once.

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
    check_writers(config)
    if resume and init_from is not None:
        raise InputError("A run is either resumed or begun from other weights: give one of the two.")
    saved: Checkpoint | None = None

    def settle(folder: Path, group: Group) -> TrainConfig:
        nonlocal saved
        settled_config, saved = settled(config, folder, group, resume=resume)
        return settled_config

    def prepare(settled_config: TrainConfig, folder: Path, group: Group, listener: Reporter) -> Run:
        return prepared(
            settled_config,
            folder,
            group,
            saved=saved,
            init_from=init_from,
            cache_dir=cache_dir,
            reporter=listener,
        )

    return conduct(
        reporter, folder=folder, device=device, settle=settle, prepare=prepare, too_large=_does_not_fit
    )


def _does_not_fit(config: TrainConfig, group: Group) -> str:
    told = (
        f"A micro-batch of {config.batch_size} sequences of {config.block_size} tokens did not fit in "
        f"{device_name(group.device)}."
    )
    if config.batch_size == 1:
        return f"{told} Take a shorter --seqlen or a smaller model."
    half = config.batch_size // 2
    return (
        f"{told} Try --batch-size {half} --accumulation {config.accumulation * config.batch_size // half}, "
        "which learns from as many sequences a step."
    )
