"""A translation run between two steps: its parts, how well it translates, and how it is written to disk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import numpy as np
import torch

from fuseline.acceleration.precision import autocast, matmul_format
from fuseline.data.pair_batches import PairBatches, prompt
from fuseline.data.pair_tokens import EOS, TARGET_TAG, PairDataset, Sentences
from fuseline.data.parallel import ParallelCorpus
from fuseline.generation.translation import translate_tokens
from fuseline.generation.writers import TranslationModel
from fuseline.models.translation_config import as_dict as model_dict
from fuseline.training.averaging import WeightAverage
from fuseline.training.bleu import Bleu, corpus_bleu
from fuseline.training.checkpoint import BEST, LATEST, Checkpoint, save_checkpoint, write_weights
from fuseline.training.distributed import Group
from fuseline.training.memory_estimate import training_state_bytes
from fuseline.training.optimizer import optimizer_state
from fuseline.training.pace import Stopwatch
from fuseline.training.random_state import random_state
from fuseline.training.reporter import Plan
from fuseline.training.schedule import CosineSchedule
from fuseline.training.schema import when_validated
from fuseline.training.step import TrainStep
from fuseline.training.translation_config import TranslateConfig, as_dict

_SHOWN = 3  # translations of validation sentences shown with their BLEU


@dataclass(frozen=True)
class Intervals:
    """The loop's part of the configuration, in steps: epochs have become steps, now that the data is
    known."""

    steps: int
    minutes: Optional[float]
    patience: Optional[int]
    log_interval: int
    eval_interval: int
    checkpoint_seconds: Optional[float]

    @property
    def eval_seconds(self) -> None:
        """Validations go by epochs alone."""

    @property
    def checkpoint_interval(self) -> int:
        return self.eval_interval

    @property
    def sample_interval(self) -> int:
        return self.eval_interval


@dataclass
class TranslationRun:
    """`taken` counts optimizer steps; `model` is the plain model, whatever wraps it inside `step`. The best
    weights are those of the highest validation BLEU, or of the lowest loss where BLEU is not counted."""

    settings: TranslateConfig
    config: Intervals
    folder: Path
    group: Group
    corpus: ParallelCorpus
    dataset: PairDataset
    model: TranslationModel
    step: TrainStep
    batches: PairBatches
    validation: PairBatches
    schedule: CosineSchedule
    average: WeightAverage[TranslationModel] | None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    taken: int = 0
    best_validation_loss: float = math.inf
    best_step: int = 0
    best_bleu: float = -math.inf
    _shown: str = ""

    @property
    def evaluated(self) -> TranslationModel:
        """The model that validates and translates: the averaged one where there is one."""
        return self.model if self.average is None else self.average.model

    @property
    def steps_per_epoch(self) -> float:
        return self.batches.batches_per_epoch / self.settings.accumulation

    @property
    def tokens_per_step(self) -> int:
        """Tokens of both languages a step learns from, on average; padding does not count."""
        return round(self.batches.tokens / self.steps_per_epoch)

    @property
    def parameters(self) -> int:
        return self.model.num_parameters()

    def stepped(self) -> None:
        if self.average is not None:
            self.average.update(self.taken)

    def validate(self) -> dict[str, float]:
        figures = {"loss": self._validation_loss()}
        if self.settings.bleu and self.taken:  # a fresh model's text has no end and no sense
            told = self.group.first(self._validation_bleu)
            figures["bleu"] = self.group.agreed(told if told is not None else math.nan)
        return figures

    def note_validation(self, figures: Mapping[str, float]) -> bool:
        """Take note of a validation; if it is the best yet, keep its weights and return True."""
        loss, bleu = figures["loss"], figures.get("bleu")
        better = loss < self.best_validation_loss if bleu is None else bleu > self.best_bleu
        if not better:
            return False
        self.best_validation_loss, self.best_step = loss, self.taken
        self.best_bleu = self.best_bleu if bleu is None else bleu
        self.group.first(
            lambda: write_weights(
                self.folder / BEST,
                self.evaluated,
                model_dict(self.model.config),
                "translate",
                step=self.taken,
                validation_loss=loss,
                validation_bleu=bleu,
            )
        )
        return True

    def sample(self) -> str:
        """BLEU of the last validation with some of its translations."""
        if self._shown:
            return self._shown
        texts = self.translated(self.dataset.validation.source, count=_SHOWN)
        return self._side_by_side(texts)

    def translated(self, source: Sentences, *, count: int | None = None, beams: int = 1) -> list[str]:
        """Translations of the first `count` of tokenized sentences, by the evaluated weights."""
        chosen = list(source)[:count]
        found = translated_ids(
            self.evaluated, chosen, self.settings.precision, beams, self.settings.length_penalty
        )
        return [self.dataset.tokenizer.decode(ids) for ids in found]

    def test(self) -> tuple[Bleu, list[str]]:
        """BLEU on the test pairs by beam search, and the translations."""
        texts = self.translated(self.dataset.test.source, beams=self.settings.beams)
        return corpus_bleu(texts, [target for _, target in self.corpus.splits["test"]]), texts

    def mfu(self, tokens_per_s: float) -> float | None:
        """A model of many shapes has no single count of FLOPs a token."""
        return None

    def save(self) -> Path:
        """Write `latest.pt` (the first process does; all must call)."""
        random = self.group.gathered(random_state(self.group.device))
        path, scaler = self.folder / LATEST, self.step.scaler
        self.group.first(
            lambda: save_checkpoint(
                path,
                Checkpoint(
                    step=self.taken,
                    position=self.taken * self.settings.accumulation,
                    config=as_dict(self.settings),
                    model_config=model_dict(self.model.config),
                    data={"fingerprint": self.dataset.fingerprint},
                    model=self.model.state_dict(),
                    optimizer=optimizer_state(self.step.optimizer),
                    scaler={} if scaler is None else scaler.state_dict(),
                    random=random,
                    best_validation_loss=self.best_validation_loss,
                    best_step=self.best_step,
                    best_bleu=self.best_bleu,
                    seconds=self.stopwatch.seconds,
                    average={} if self.average is None else self.average.state(),
                ),
                "translate",
            )
        )
        return path

    def close(self) -> None:
        """Let go of the batches, of compiled code and of recorded graphs."""
        self.batches.close()
        self.validation.close()
        self.step.close()

    def plan(self) -> Plan:
        return Plan(
            folder=self.folder,
            device=str(self.group.device),
            processes=self.group.world_size,
            precision=self.settings.precision,
            execution=self.settings.execution,
            kernels=self.settings.kernels,
            deterministic=bool(self.settings.deterministic),
            parameters=self.parameters,
            vocab_size=self.dataset.tokenizer.vocab_size,
            steps=self.config.steps,
            start=self.taken,
            minutes=self.config.minutes,
            warmup_steps=self.settings.warmup_steps,
            validations=when_validated(self.config.eval_interval, self.config.eval_seconds),
            tokens_per_step=self.tokens_per_step,
            train_tokens=self.batches.tokens,
            validation_tokens=self.validation.tokens,
            memory_bytes=estimated_bytes(self.settings, self.parameters, self.model.config.vocab_size),
        )

    @torch.no_grad()
    def _validation_loss(self) -> float:
        """Mean loss in nats a target token over all validation pairs, each batch by its tokens."""
        total = torch.zeros((), dtype=torch.float64, device=self.group.device)
        count = torch.zeros((), dtype=torch.int64, device=self.group.device)
        model, precision = self.evaluated, self.settings.precision
        was_training = model.training
        model.eval()
        try:
            with matmul_format(precision), autocast(precision, self.group.device):
                for batch in self.validation.epoch():
                    tokens = (batch[-1] >= 0).sum()
                    total += model(*batch).double() * tokens
                    count += tokens
        finally:
            model.train(was_training)
        return float(total / count)

    def _validation_bleu(self) -> float:
        texts = self.translated(self.dataset.validation.source)
        bleu = corpus_bleu(texts, [target for _, target in self.corpus.splits["validation"]])
        self._shown = f"BLEU {bleu.score:.2f} on {len(texts)} pairs\n{self._side_by_side(texts[:_SHOWN])}"
        return bleu.score

    def _side_by_side(self, texts: Sequence[str]) -> str:
        pairs = self.corpus.splits["validation"][: len(texts)]
        return "\n".join(
            f"{source}\n  = {text}\n  ({target})" for (source, target), text in zip(pairs, texts, strict=True)
        )


def translated_ids(
    model: TranslationModel,
    source: Sequence[Sequence[int] | np.ndarray],
    precision: str,
    beams: int,
    length_penalty: float,
) -> list[list[int]]:
    """Ids of the translations of tokenized sentences.

    What was trained in 16 bits is searched in TF32 on a GPU and in fp32 on a CPU: 16 bits of a logit cannot
    tell near ones apart, and the search is not bound by its products.
    """
    config = model.config
    prompts = [
        prompt(ids, encoder_decoder=config.architecture == "encoder-decoder", length=config.length)
        for ids in source
    ]
    device = next(model.parameters()).device
    with matmul_format("tf32" if device.type == "cuda" and precision != "fp32" else "fp32"):
        return translate_tokens(
            model,
            prompts,
            start_id=TARGET_TAG,
            eos_id=EOS,
            beams=beams,
            length_penalty=length_penalty,
            batch_size=256 if device.type == "cuda" else 64,
        )


def estimated_bytes(config: TranslateConfig, parameters: int, vocab_size: int) -> int:
    """Bytes that eager training wants at its peak, give or take a half: weights, gradients and moments, and
    for each token what the blocks and the head keep for the backward."""
    blocks = config.num_layers * (2 if config.architecture == "encoder-decoder" else 1)
    per_token = 4 * (blocks * (20 * config.embed_dim + 4 * config.ffn_dim) + 4 * vocab_size)
    per_token += 4 * 3 * blocks * config.num_heads * config.length
    state = training_state_bytes(parameters, vocab_size * config.embed_dim, config.optimizer_state)
    return state + config.max_tokens * per_token
