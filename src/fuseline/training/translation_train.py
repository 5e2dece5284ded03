"""`train_translation`: from a configuration to a model that translates, with everything around the loop."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fuseline.acceleration.precision import check_precision
from fuseline.data.pair_batches import PairBatches
from fuseline.data.pair_tokens import PairDataset, prepare_pairs
from fuseline.data.parallel import DOWNLOADED, ParallelCorpus, load_parallel
from fuseline.errors import InputError
from fuseline.files.writing import write_json
from fuseline.generation.writers import TranslationModel
from fuseline.models.encoder_decoder import EncoderDecoder
from fuseline.models.translation import DecoderOnly
from fuseline.models.translation_config import TranslationConfig
from fuseline.training import arena
from fuseline.training.averaging import WeightAverage
from fuseline.training.bleu import corpus_bleu
from fuseline.training.checkpoint import (
    BEST,
    LATEST,
    Checkpoint,
    check_held,
    load_checkpoint,
    load_model_state,
    read_weights,
    settings_of,
)
from fuseline.training.conduct import check_writers, conduct, device_name
from fuseline.training.distributed import Group
from fuseline.training.epoch_files import EpochFiles
from fuseline.training.execution import find_execution
from fuseline.training.optimizer import make_optimizer
from fuseline.training.preparation import check_vacant
from fuseline.training.reporter import Reporter, TrainResult
from fuseline.training.resume import prepare_folder, restore
from fuseline.training.schedule import CosineSchedule
from fuseline.training.schema import changed
from fuseline.training.step import TrainStep
from fuseline.training.translation_config import TranslateConfig, as_dict, continued
from fuseline.training.translation_run import Intervals, TranslationRun

TEST = "test.json"


@dataclass(frozen=True)
class TranslationResult:
    """How a run ended, and the BLEU of its best weights on the test pairs (None if it was not counted)."""

    training: TrainResult
    bleu: float | None
    signature: str | None
    beams: int


def build_model(config: TranslationConfig) -> TranslationModel:
    """A fresh model of the kind that `config` names."""
    return EncoderDecoder(config) if config.architecture == "encoder-decoder" else DecoderOnly(config)


def load_translation_model(path: Path, **options: Any) -> TranslationModel:
    """The model of a run's `best.pt` or `latest.pt`, on the CPU, with `options` replacing fields of its
    config.

    Raises `InputError` if the file is missing, truncated or foreign, or `options` ask for other shapes.
    """
    shape, state = read_weights(path, "translate")
    config = settings_of(TranslationConfig, {**shape, **options}, path)
    check_held(config.num_weights, state, path)
    model = build_model(config)
    load_model_state(model, state, path)
    return model


def resolved(config: TranslateConfig, device: torch.device) -> TranslateConfig:
    """`config` with every `auto` decided for the device, which must be able to do it."""
    on_gpu = device.type == "cuda"
    choices: dict[str, object] = {}
    if config.precision == "auto":
        choices["precision"] = "bf16" if on_gpu and torch.cuda.is_bf16_supported() else "fp32"
    if config.execution == "auto":
        choices["execution"] = "graph" if on_gpu else "eager"
    if config.deterministic is None:
        choices["deterministic"] = not on_gpu
    config = changed(config, choices)
    check_precision(config.precision, device)
    find_execution(config.execution, device)
    return config


def train_translation(
    config: TranslateConfig,
    reporter: Reporter | None = None,
    *,
    folder: Path,
    device: str = "cpu",
    resume: bool = False,
    cache_dir: Path | None = None,
) -> TranslationResult:
    """Train a translation model as `config` says, in `folder`: metrics, a JSON file for each epoch,
    checkpoints, the tokenizer and, at the end, the test's translations are written there.

    Args:
        config: see `TranslateConfig`; `auto` fields are decided for `device`.
        reporter: is told what happens; nobody by default.
        folder: made if it is not there; must not hold a run, unless `resume`.
        device: `cpu`, `cuda`, `cuda:1`, ...
        resume: go on from the checkpoint in `folder`; in deterministic mode as if it had never stopped.
        cache_dir: where corpora and tokens are kept; Fuseline's cache by default.

    Raises:
        InputError: something in the input, the folder or the machine's memory prevents it.
    """
    check_writers(config)
    if config.bleu:
        corpus_bleu(["a"], ["a"])  # is it there? Better asked now than after the training.
    saved: Checkpoint | None = None
    tested: list[tuple[float, str]] = []

    def settle(folder: Path, group: Group) -> TranslateConfig:
        nonlocal saved
        if not resume:
            check_vacant(folder)
            return resolved(_shareable(config, group), group.device)
        saved = load_checkpoint(folder / LATEST, "translate")
        given = {name: value for name, value in as_dict(config).items() if value not in (None, "auto")}
        settled = continued(settings_of(TranslateConfig, saved.config, folder / LATEST), given)
        return resolved(_shareable(settled, group), group.device)

    def prepare(settled: TranslateConfig, folder: Path, group: Group, listener: Reporter) -> TranslationRun:
        return _prepared(settled, folder, group, saved, cache_dir)

    def afterwards(run: TranslationRun, result: TrainResult) -> None:
        if run.settings.bleu and result.outcome != "interrupted":
            run.group.first(lambda: tested.append(_tested(run)))

    training = conduct(
        reporter,
        folder=folder,
        device=device,
        settle=settle,
        prepare=prepare,
        too_large=_does_not_fit,
        writers=lambda run: [EpochFiles(run.folder, run.steps_per_epoch)],
        afterwards=afterwards,
    )
    bleu, signature = tested[0] if tested else (None, None)
    return TranslationResult(training, bleu, signature, config.beams)


def check_data(config: TranslateConfig, folder: Path, device: str, *, resume: bool) -> None:
    """`InputError` for what would prevent a run before its first step: the folder, the machine, or sentences
    of the user's own that cannot be read. Known corpora are not downloaded for it; nothing is written."""
    if not resume:
        check_vacant(folder)
    resolved(config, torch.device(device))
    if config.data not in DOWNLOADED:
        load_parallel(config.data, config.source, config.target)


def load_pairs(config: TranslateConfig, cache_dir: Path | None) -> tuple[ParallelCorpus, PairDataset]:
    """The corpus that a configuration names, and its tokens."""
    corpus = load_parallel(config.data, config.source, config.target, cache_dir)
    dataset = prepare_pairs(
        corpus,
        vocab_size=config.vocab_size,
        dropout=config.bpe_dropout,
        variants=config.bpe_variants,
        cache_dir=cache_dir,
    )
    return corpus, dataset


def training_batches(
    config: TranslateConfig, dataset: PairDataset, device: torch.device, *, start: int = 0, stride: int = 1
) -> PairBatches:
    """The training pairs as micro-batches, `start` the first and every `stride`-th."""
    return PairBatches(
        dataset.train,
        encoder_decoder=config.architecture == "encoder-decoder",
        max_tokens=config.max_tokens,
        length=config.length,
        seed=config.seed,
        device=device,
        start=start,
        stride=stride,
        bucketed=config.bucketed,
    )


def _prepared(
    config: TranslateConfig, folder: Path, group: Group, saved: Checkpoint | None, cache_dir: Path | None
) -> TranslationRun:
    corpus, dataset = group.first(lambda: load_pairs(config, cache_dir)) or load_pairs(config, cache_dir)
    if saved is not None and saved.data.get("fingerprint") != dataset.fingerprint:
        raise InputError(
            f"The text or tokenizer of {config.data!r} is not the one that this run began with: it has "
            "changed since. Bring it back, or begin a new run."
        )
    torch.manual_seed(config.seed)
    model = build_model(config.model_config(dataset.tokenizer.vocab_size))
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
    start = 0 if saved is None else saved.position
    batches = training_batches(
        config, dataset, group.device, start=start + group.rank, stride=group.world_size
    )
    validation = PairBatches(
        [dataset.validation],
        encoder_decoder=config.architecture == "encoder-decoder",
        max_tokens=config.max_tokens,
        length=config.length,
        seed=config.seed,
        device=group.device,
        shuffle=False,
    )
    intervals = _intervals(config, batches.batches_per_epoch)
    run = TranslationRun(
        settings=config,
        config=intervals,
        folder=folder,
        group=group,
        corpus=corpus,
        dataset=dataset,
        model=model,
        step=TrainStep(
            group.wrapped(model),
            optimizer,
            precision=config.precision,
            execution=config.execution,
            accumulation=config.accumulation // group.world_size,
            grad_clip=config.grad_clip,
        ),
        batches=batches,
        validation=validation,
        schedule=CosineSchedule(
            config.learning_rate, config.min_learning_rate, config.warmup_steps, intervals.steps
        ),
        average=WeightAverage(model, config.average) if config.average else None,
    )
    torch.manual_seed(config.seed + 7919 * group.rank)  # each process its own stream of dropout
    if saved is not None:
        _restore(run, saved)
    group.first(lambda: prepare_folder(run, as_dict(run.settings)))
    if saved is None:
        run.save()
    return run


def _intervals(config: TranslateConfig, batches_per_epoch: int) -> Intervals:
    per_epoch = batches_per_epoch / config.accumulation
    steps = config.steps if config.steps is not None else max(1, round(config.epochs * per_epoch))
    return Intervals(
        steps=steps,
        minutes=config.minutes,
        patience=config.patience,
        log_interval=config.log_interval,
        eval_interval=max(1, math.ceil(config.eval_epochs * per_epoch)),
        checkpoint_seconds=config.checkpoint_seconds,
    )


def _shareable(config: TranslateConfig, group: Group) -> TranslateConfig:
    if config.accumulation % group.world_size:
        raise InputError(
            f"accumulation {config.accumulation} cannot be shared out among {group.world_size} processes: it "
            f"counts the micro-batches of all of them. Use a multiple of {group.world_size}."
        )
    return config


def _restore(run: TranslationRun, saved: Checkpoint) -> None:
    restore(run, saved, run.settings.seed)
    if run.average is not None:
        if not saved.average:
            raise InputError(f"{run.folder / LATEST} has no running average of the weights: it was damaged.")
        load_model_state(run.average.model, saved.average, run.folder / LATEST)
    run.best_bleu = saved.best_bleu


def _tested(run: TranslationRun) -> tuple[float, str]:
    """Translate the test pairs by the best weights, and write what came of it."""
    load_model_state(run.evaluated, read_weights(run.folder / BEST, "translate")[1], run.folder / BEST)
    bleu, texts = run.test()
    rows = [
        {"source": source, "translation": text, "reference": target}
        for (source, target), text in zip(run.corpus.splits["test"], texts, strict=True)
    ]
    content = {
        **asdict(bleu),
        "beams": run.settings.beams,
        "length_penalty": run.settings.length_penalty,
        "step": run.best_step,
        "translations": rows,
    }
    write_json(run.folder / TEST, content, indent=1)
    return bleu.score, bleu.signature


def _does_not_fit(config: TranslateConfig, group: Group) -> str:
    half = max(config.length, config.max_tokens // 2)
    return (
        f"A micro-batch of {config.max_tokens} tokens did not fit in {device_name(group.device)}. "
        f"Try --max-tokens {half} --accumulation {2 * config.accumulation}, which learns from as many a step."
    )
