"""What a model has learned: loss curves without dropout, and BLEU over seeds."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from fuseline.bench.translation.kernel_sets import KERNEL_SETS
from fuseline.bench.translation.learner import Learner
from fuseline.data.pair_tokens import PairDataset
from fuseline.data.parallel import ParallelCorpus
from fuseline.timing import synchronize
from fuseline.training.bleu import Bleu, corpus_bleu
from fuseline.training.translation_config import TranslateConfig
from fuseline.training.translation_run import translated_ids


@dataclass(frozen=True)
class Learned:
    """One trained model: BLEU of its greedy translations of the test pairs, and seconds of training an epoch,
    the first steps (which record or compile) left out."""

    kernels: str
    seed: int
    bleu: Bleu
    epoch_s: float
    steps: int


def loss_curve(
    config: TranslateConfig, dataset: PairDataset, kernels: str, *, device: torch.device, steps: int
) -> list[float]:
    """The loss of each of `steps` steps in fp32, nothing dropped: all kernels should give the same."""
    learner = Learner(
        replace(config, dropout=0.0),
        dataset,
        KERNEL_SETS[kernels],
        device=device,
        precision="fp32",
        execution="eager",
        steps=steps,
    )
    losses = torch.stack([learner.advance() for _ in range(steps)]).tolist()
    learner.close()
    return [float(loss) for loss in losses]


def learn(
    config: TranslateConfig,
    corpus: ParallelCorpus,
    dataset: PairDataset,
    kernels: str,
    *,
    device: torch.device,
    precision: str,
    execution: str,
    steps: int,
) -> Learned:
    """Train for `steps` steps from `config.seed`, and translate the test pairs."""
    learner = Learner(
        config,
        dataset,
        KERNEL_SETS[kernels],
        device=device,
        precision=precision,
        execution=execution,
        steps=steps,
    )
    per_epoch = learner.batches.batches_per_epoch
    first = min(steps - 1, 2)
    for _ in range(first):
        learner.advance()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps - first):
        learner.advance()
    synchronize(device)
    step_s = (time.perf_counter() - begin) / (steps - first)
    found = translated_ids(learner.model, list(dataset.test.source), precision, 1, 1.0)
    texts = [dataset.tokenizer.decode(ids) for ids in found]
    bleu = corpus_bleu(texts, [target for _, target in corpus.splits["test"]])
    learner.close()
    return Learned(kernels, config.seed, bleu, step_s * per_epoch, steps)
