"""A translation model that takes training steps: the same weights, batches and rates for whoever is
compared."""

from __future__ import annotations

from dataclasses import replace

import torch

from fuseline.bench.translation.kernel_sets import KernelSet, with_kernels
from fuseline.data.pair_tokens import PairDataset
from fuseline.training.execution import find_execution
from fuseline.training.optimizer import make_optimizer, set_learning_rate
from fuseline.training.schedule import CosineSchedule
from fuseline.training.step import TrainStep
from fuseline.training.translation_config import TranslateConfig
from fuseline.training.translation_train import build_model, training_batches


class Learner:
    """A fresh model of `config` under one set of kernels, and `advance()`, a step of its training."""

    def __init__(
        self,
        config: TranslateConfig,
        dataset: PairDataset,
        kernel_set: KernelSet,
        *,
        device: torch.device,
        precision: str,
        execution: str,
        steps: int,
    ) -> None:
        config = replace(config, fused=kernel_set.name == "fuseline")
        torch.manual_seed(config.seed)
        self.model = build_model(config.model_config(dataset.tokenizer.vocab_size)).to(device).train()
        with_kernels(self.model, kernel_set.kernels)
        self.batches = training_batches(config, dataset, device)
        self._schedule = CosineSchedule(
            config.learning_rate, config.min_learning_rate, config.warmup_steps, steps
        )
        optimizer = make_optimizer(
            self.model,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=(config.beta1, config.beta2),
            capturable=find_execution(execution, device).whole_step,
        )
        self.step = TrainStep(
            self.model,
            optimizer,
            precision=precision,
            execution=execution,
            grad_clip=config.grad_clip,
            kernels=config.fused,
        )
        self.taken = 0
        torch.manual_seed(config.seed)

    def advance(self) -> torch.Tensor:
        """Take one step; the loss, on the device."""
        set_learning_rate(self.step.optimizer, self._schedule(self.taken))
        self.taken += 1
        return self.step(next(self.batches))

    def close(self) -> None:
        self.step.close()
        self.batches.close()
