"""The plan of a training run, made without reading its data or writing anything."""

from __future__ import annotations

from pathlib import Path

import torch

from fuseline.data.corpora import check_corpus
from fuseline.models.gpt import GPT
from fuseline.training.checkpoint import LATEST, peek
from fuseline.training.config import TrainConfig
from fuseline.training.distributed import Group
from fuseline.training.memory_estimate import estimated_bytes
from fuseline.training.preparation import check_machine, check_vacant, resolved
from fuseline.training.reporter import Plan
from fuseline.training.schema import when_validated

# Sizes known without the data. A character tokenizer has one id a character of its text: 65 in Shakespeare's.
_VOCAB_SIZES = {"gpt2": 50257, "bpe": 1000, "char": 65}


def dry_run(config: TrainConfig, *, folder: Path, device: str, resume: bool = False) -> Plan:
    """The plan of `train` with these arguments. Its numbers of tokens are None; with a character tokenizer
    its vocabulary is a guess.

    Raises:
        InputError: the folder holds a run already (or none to resume), there is no such data, or the device
            cannot do what the configuration says.
    """
    start = peek(folder / LATEST)[1] if resume else 0
    if not resume:
        check_vacant(folder)
    group = Group(rank=0, world_size=1, device=torch.device(device))
    check_corpus(config.data)
    config = resolved(config, group, compiles=False)
    check_machine(config, group)
    vocab_size = config.vocab_size or _VOCAB_SIZES[config.tokenizer]
    with torch.device("meta"):
        model = GPT(config.model_config(vocab_size))
    parameters = model.num_parameters()
    return Plan(
        folder=folder,
        device=device,
        processes=1,
        precision=config.precision,
        execution=config.execution,
        kernels=config.kernels,
        deterministic=bool(config.deterministic),
        parameters=parameters,
        vocab_size=vocab_size,
        steps=config.steps,
        start=start,
        minutes=config.minutes,
        warmup_steps=config.warmup_steps,
        validations=when_validated(config.eval_interval, config.eval_seconds),
        tokens_per_step=config.tokens_per_step,
        train_tokens=None,
        validation_tokens=None,
        memory_bytes=estimated_bytes(
            model.config, parameters, config.batch_size, config.precision, config.optimizer_state
        ),
    )
