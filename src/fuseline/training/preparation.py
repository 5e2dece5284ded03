"""From a configuration to a run that is ready for its next step, fresh or from its checkpoint."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

from fuseline import native
from fuseline.acceleration.precision import check_precision, compute_dtype
from fuseline.data.corpora import load_corpus
from fuseline.data.token_files import TokenDataset, prepare
from fuseline.errors import InputError
from fuseline.ops import attention_backends
from fuseline.training import arena
from fuseline.training.checkpoint import LATEST, Checkpoint, load_checkpoint, load_model_state, settings_of
from fuseline.training.config import TrainConfig, as_dict, continued
from fuseline.training.distributed import Group
from fuseline.training.execution import fastest_execution, find_execution
from fuseline.training.initial_weights import fresh_model, pretrained_model
from fuseline.training.optimizer import make_optimizer
from fuseline.training.reporter import Reporter
from fuseline.training.resume import TOKENIZER, prepare_folder, restore
from fuseline.training.run import DataIdentity, Run
from fuseline.training.schedule import CosineSchedule
from fuseline.training.schema import changed
from fuseline.training.step import TrainStep
from fuseline.training.stream import Stream


def settled(
    config: TrainConfig, folder: Path, group: Group, *, resume: bool
) -> tuple[TrainConfig, Checkpoint | None]:
    """The configuration with nothing left open, and the checkpoint to go on from if there is one.

    Raises:
        InputError: the folder holds another run (or none to resume), or the configuration does not go with
            the checkpoint or the machine.
    """
    saved = None
    if resume:
        saved = load_checkpoint(folder / LATEST)
        given = {
            name: value for name, value in as_dict(config).items() if value not in (None, "auto", "pick")
        }
        config = continued(settings_of(TrainConfig, saved.config, folder / LATEST), given)
    else:
        check_vacant(folder)
        config = resolved(config, group)
    check_machine(config, group)
    return config, saved


def prepared(
    config: TrainConfig,
    folder: Path,
    group: Group,
    *,
    saved: Checkpoint | None,
    init_from: Path | None,
    cache_dir: Path | None,
    reporter: Reporter,
) -> Run:
    """A run in `folder`, at its first step or at the step of `saved`. `config` is a settled one.

    Nothing is written before all of it is known to fit together.

    Raises:
        InputError: configuration, data and weights do not go together.
    """
    dataset, identity = _dataset(config, group, cache_dir, reporter)
    if saved is not None:
        _check_identity(settings_of(DataIdentity, saved.data, folder / LATEST), identity, config)
    run = _assembled(config, folder, group, dataset, identity, saved, init_from)
    group.first(lambda: prepare_folder(run, as_dict(run.config)))
    if saved is None:
        run.save()
    return run


def resolved(config: TrainConfig, group: Group, *, compiles: bool = True) -> TrainConfig:
    """`config` with every `auto` decided for the machine in hand. On a GPU this compiles the kernels if they
    are not there yet. If `compiles` is False, it compiles nothing and assumes that the kernels will be there.

    In 16 bits the fastest step of one process is our kernels recorded as one graph. If torch.compile is asked
    for, or several processes train, all kernels are torch's, which torch.compile fuses.
    """
    device = group.device
    on_gpu = device.type == "cuda"
    precision, execution, norm = config.precision, config.execution, config.norm
    if precision == "auto":
        precision = "bf16" if on_gpu and torch.cuda.is_bf16_supported() else "fp32"
    in_16_bits = compute_dtype(precision) != torch.float32
    ours = norm == "fuseline" or (norm == "auto" and on_gpu and in_16_bits and _has_kernels(compiles))
    if execution == "auto":
        execution = fastest_execution(device, group.world_size, fused=ours)
    if norm == "auto":
        norm = "fuseline" if ours and find_execution(execution, device).backend is None else "torch"
    choices: dict[str, object] = {"precision": precision, "execution": execution, "norm": norm}
    if config.loss == "auto":
        choices["loss"] = "fuseline-linear" if norm == "fuseline" else "float32"
    if config.deterministic is None:
        choices["deterministic"] = not on_gpu
    if config.decay_steps is None:
        choices["decay_steps"] = config.steps
    return changed(config, choices)


def _has_kernels(compiles: bool) -> bool:
    return (not compiles and bool(native.unbuilt())) or native.ready("cuda")


def check_vacant(folder: Path) -> None:
    """`InputError` if `folder` holds a run, or is no folder."""
    if (folder / LATEST).exists():
        raise InputError(
            f"{folder} holds a run already. Go on with it by --out {folder} --resume, or give another --out."
        )
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; --out names a folder.")


def check_machine(config: TrainConfig, group: Group) -> None:
    """`InputError` if this device or this number of processes cannot do what the configuration says."""
    check_precision(config.precision, group.device)
    find_execution(config.execution, group.device)
    head_dim = config.embed_dim // config.num_heads
    reason = attention_backends.supports(
        config.attention, group.device, compute_dtype(config.precision), head_dim, config.dropout
    )
    if reason is not None:
        raise InputError(f"Attention {config.attention!r} does not run here: {reason}. Take 'pick'.")
    if config.accumulation % group.world_size:
        raise InputError(
            f"accumulation {config.accumulation} cannot be shared out among {group.world_size} processes: it "
            f"counts the micro-batches of all of them. Use a multiple of {group.world_size}."
        )


def _dataset(
    config: TrainConfig, group: Group, cache_dir: Path | None, reporter: Reporter
) -> tuple[TokenDataset, DataIdentity]:
    """The tokenized data: made by the first process, and read from its cache by the others."""

    def tokenized() -> tuple[TokenDataset, DataIdentity]:
        corpus = load_corpus(config.data, cache_dir)
        dataset = prepare(
            corpus,
            config.tokenizer,
            vocab_size=config.vocab_size,
            validation_fraction=config.validation_fraction,
            cache_dir=cache_dir,
            progress=reporter.tokenized,
        )
        tokenizer = hashlib.sha256((dataset.path / TOKENIZER).read_bytes()).hexdigest()
        return dataset, DataIdentity(corpus.fingerprint, tokenizer, dataset.vocab_size)

    dataset, identity = group.first(tokenized) or tokenized()
    for name, tokens in (("training", dataset.train), ("validation", dataset.validation)):
        _check_length(name, tokens, config)
    return dataset, identity


def _check_length(name: str, tokens: np.ndarray, config: TrainConfig) -> None:
    if len(tokens) <= config.block_size:
        raise InputError(
            f"The {name} part of {config.data!r} has {len(tokens)} tokens, and a sequence of block_size "
            f"{config.block_size} needs {config.block_size + 1}. Give more text, a smaller --seqlen, or "
            "another --validation-fraction."
        )


def _assembled(
    config: TrainConfig,
    folder: Path,
    group: Group,
    dataset: TokenDataset,
    identity: DataIdentity,
    saved: Checkpoint | None,
    init_from: Path | None,
) -> Run:
    if init_from is None:
        model = fresh_model(config, dataset.vocab_size)
    else:
        model, config = pretrained_model(config, init_from, dataset.vocab_size)
    if saved is not None:
        load_model_state(model, saved.model, folder / LATEST)
    model = arena.move(model, group.device) if config.arena else model.to(group.device)
    model.train()
    optimizer = make_optimizer(
        model,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        betas=(config.beta1, config.beta2),
        capturable=find_execution(config.execution, group.device).whole_step,
        state=config.optimizer_state,
    )
    if config.arena:
        arena.make_moments(optimizer)
    step = TrainStep(
        group.wrapped(model),
        optimizer,
        precision=config.precision,
        execution=config.execution,
        accumulation=config.accumulation // group.world_size,
        grad_clip=config.grad_clip,
    )
    run = Run(
        config=config,
        folder=folder,
        group=group,
        dataset=dataset,
        identity=identity,
        model=model,
        step=step,
        batches=Stream(
            dataset.train,
            batch_size=config.batch_size,
            block_size=config.block_size,
            seed=config.seed,
            group=group,
            start=0 if saved is None else saved.position,
        ),
        schedule=CosineSchedule(
            config.learning_rate,
            config.min_learning_rate,
            config.warmup_steps,
            config.decay_steps or config.steps,
        ),
    )
    # Each process its own stream of dropout; the first keeps the seed's.
    torch.manual_seed(config.seed + 7919 * group.rank)
    if saved is not None:
        restore(run, saved, config.seed)
    return run


def _check_identity(began: DataIdentity, now: DataIdentity, config: TrainConfig) -> None:
    if began.vocab_size != now.vocab_size:
        raise InputError(
            f"The checkpoint's model knows {began.vocab_size} tokens, and tokenizer {config.tokenizer!r} now "
            f"makes {now.vocab_size} of {config.data!r}. The data has changed since the run began: bring it "
            "back, or begin a new run."
        )
    for what in ("corpus", "tokenizer"):
        if getattr(began, what) != getattr(now, what):
            raise InputError(
                f"The {what} of {config.data!r} is not the one that this run began with: it has changed "
                "since. Bring it back, or begin a new run from these weights with --init-from."
            )
