"""What a rung costs in precision: its loss and gradients against fp32, on the same batch and weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fuseline.acceleration.precision import matmul_format
from fuseline.bench.ladder.contender import Batch, Contender
from fuseline.bench.ladder.learner import TrainingState
from fuseline.bench.ladder.result import Figure
from fuseline.bench.ladder.spec import RunSpec, baseline
from fuseline.models.gpt import GPT

CHUNK_TOKENS = 4096  # the reference goes through the batch in pieces: what is being checked may save memory


@dataclass(frozen=True)
class Reference:
    """Loss and gradients (by name, unpadded, on the CPU) in fp32 with naive attention and TF32 off."""

    batch: Batch
    state: TrainingState
    loss: float
    gradients: dict[str, torch.Tensor]


def reference(spec: RunSpec, batch: Batch, state: TrainingState) -> Reference:
    """Compute it for the model of `spec` on the device of `batch`."""
    plain = baseline(spec.preset, batch=spec.batch, seqlen=spec.seqlen, vocab_size=spec.vocab_size)
    plain = replace(plain, bias=spec.bias)
    device = batch[0].device
    with device:
        model = GPT(plain.config)
    state.fill(model)
    pieces = max(1, batch[0].numel() // CHUNK_TOKENS)
    total = 0.0
    with matmul_format("fp32"):
        for tokens_BT, targets_BT in zip(batch[0].chunk(pieces), batch[1].chunk(pieces), strict=True):
            loss = model(tokens_BT, targets_BT) * (tokens_BT.shape[0] / batch[0].shape[0])
            loss.backward()
            total += float(loss.detach())
    gradients = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return Reference(batch, state, total, gradients)


def errors(contender: Contender, truth: Reference) -> dict[str, Figure]:
    """`loss_error` and `grad_error`, relative; the gradient's is norm(g - g_fp32) / norm(g_fp32) over all
    parameters together. Leaves the contender's weights at those of the reference."""
    loss, gradients = contender.gradients(truth.batch, truth.state)
    difference, norm = 0.0, 0.0
    for name, gradient in gradients.items():
        true = truth.gradients[name].to(gradient.device)
        difference += float(torch.linalg.vector_norm(gradient - true, dtype=torch.float64)) ** 2
        norm += float(torch.linalg.vector_norm(true, dtype=torch.float64)) ** 2
    return {
        "loss_error": Figure(abs(loss - truth.loss) / abs(truth.loss)),
        "grad_error": Figure((difference / norm) ** 0.5),
    }
