"""A run between two steps: its parts, and how it is written to disk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from fuseline.acceleration.precision import autocast, matmul_format
from fuseline.data.token_files import TokenDataset
from fuseline.generation.sampling import sample
from fuseline.models.gpt import GPT
from fuseline.models.gpt_config import as_dict as model_dict
from fuseline.timing import flops_per_token, mfu
from fuseline.training.checkpoint import BEST, LATEST, Checkpoint, save_checkpoint, save_weights
from fuseline.training.config import TrainConfig, as_dict
from fuseline.training.distributed import Group
from fuseline.training.evaluation import evaluate
from fuseline.training.memory_estimate import estimated_bytes
from fuseline.training.optimizer import optimizer_state
from fuseline.training.pace import Stopwatch
from fuseline.training.random_state import random_state
from fuseline.training.reporter import Plan
from fuseline.training.schedule import CosineSchedule
from fuseline.training.schema import when_validated
from fuseline.training.step import TrainStep
from fuseline.training.stream import Stream

_TOP_K = 200  # nanoGPT's sample.py


@dataclass(frozen=True)
class DataIdentity:
    """What a run reads, by content: a resumed run must read the same."""

    corpus: str
    tokenizer: str
    vocab_size: int


@dataclass
class Run:
    """`taken` counts optimizer steps; `model` is the plain model, whatever wraps it inside `step`."""

    config: TrainConfig
    folder: Path
    group: Group
    dataset: TokenDataset
    identity: DataIdentity
    model: GPT
    step: TrainStep
    batches: Stream
    schedule: CosineSchedule
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    taken: int = 0
    best_validation_loss: float = math.inf
    best_step: int = 0

    def save(self) -> Path:
        """Write `latest.pt` (the first process does; all must call)."""
        random = self.group.gathered(random_state(self.group.device))
        path = self.folder / LATEST
        scaler = self.step.scaler
        self.group.first(
            lambda: save_checkpoint(
                path,
                Checkpoint(
                    step=self.taken,
                    position=self.taken * self.config.accumulation,
                    config=as_dict(self.config),
                    model_config=model_dict(self.model.config),
                    data=asdict(self.identity),
                    model=self.model.state_dict(),
                    optimizer=optimizer_state(self.step.optimizer),
                    scaler={} if scaler is None else scaler.state_dict(),
                    random=random,
                    best_validation_loss=self.best_validation_loss,
                    best_step=self.best_step,
                    seconds=self.stopwatch.seconds,
                ),
            )
        )
        return path

    def note_validation(self, figures: Mapping[str, float]) -> bool:
        """Take note of a validation loss; if it is the lowest yet, keep its weights and return True."""
        loss = figures["loss"]
        if not loss < self.best_validation_loss:
            return False
        self.best_validation_loss, self.best_step = loss, self.taken
        self.group.first(
            lambda: save_weights(self.folder / BEST, self.model, step=self.taken, validation_loss=loss)
        )
        return True

    @property
    def tokens_per_step(self) -> int:
        return self.config.tokens_per_step

    @property
    def parameters(self) -> int:
        return self.model.num_parameters()

    def stepped(self) -> None:
        """Nothing is kept beside the weights."""

    def validate(self) -> dict[str, float]:
        config = self.config
        loss = evaluate(
            self.model,
            self.dataset.validation,
            batches=config.eval_batches,
            batch_size=config.batch_size,
            block_size=config.block_size,
            precision=config.precision,
            group=self.group,
        )
        return {"loss": loss}

    def sample(self) -> str:
        """Text from the model, with random numbers apart from the training's."""
        device, tokenizer = self.group.device, self.dataset.tokenizer
        start = self.dataset.validation[0] if tokenizer.end_of_text is None else tokenizer.end_of_text
        prompt = torch.tensor([[int(start)]], device=device)
        generator = torch.Generator(device).manual_seed(self.config.seed + self.taken)
        precision, count = self.config.precision, self.config.sample_tokens
        with matmul_format(precision), autocast(precision, device):
            tokens = sample(self.model, prompt, count, top_k=_TOP_K, generator=generator)
        text: str = tokenizer.decode(tokens[0, 1:].tolist())
        return text

    def mfu(self, tokens_per_s: float) -> float | None:
        device = self.group.device
        if device.type != "cuda":
            return None
        shape = self.model.config
        per_token = flops_per_token(self.parameters, shape.num_layers, shape.embed_dim, shape.block_size)
        return mfu(tokens_per_s * per_token / self.group.world_size, torch.cuda.get_device_name(device))

    def close(self) -> None:
        """Let go of the batches' thread, of compiled code and of recorded graphs."""
        self.batches.close()
        self.step.close()

    def plan(self) -> Plan:
        parameters = self.parameters
        return Plan(
            folder=self.folder,
            device=str(self.group.device),
            processes=self.group.world_size,
            precision=self.config.precision,
            execution=self.config.execution,
            kernels=self.config.kernels,
            deterministic=bool(self.config.deterministic),
            parameters=parameters,
            vocab_size=self.dataset.vocab_size,
            steps=self.config.steps,
            start=self.taken,
            minutes=self.config.minutes,
            warmup_steps=self.config.warmup_steps,
            validations=when_validated(self.config.eval_interval, self.config.eval_seconds),
            tokens_per_step=self.config.tokens_per_step,
            train_tokens=len(self.dataset.train),
            validation_tokens=len(self.dataset.validation),
            memory_bytes=estimated_bytes(
                self.model.config,
                parameters,
                self.config.batch_size,
                self.config.precision,
                self.config.optimizer_state,
            ),
        )
