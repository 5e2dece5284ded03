"""The model and the batch of a case: random weights, the same for everyone, and nothing from a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseline.acceleration.observe import call_model
from fuseline.bench.acceleration.case import CAUSAL, IMAGES, MASKED, VECTORS, Case
from fuseline.errors import InputError

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_PREDICTED = 1 / 7
_NOT_PREDICTED = -100


@dataclass(frozen=True)
class Made:
    """A model with the batch that it is called with. `loss` is None where the model returns its own."""

    model: nn.Module
    batch: Any
    loss: Any = None

    def loss_of(self, called: nn.Module) -> Tensor:
        """Of the batch, by `called`: the model, or what compiles it."""
        output = call_model(called, self.batch)
        found: Tensor = output.loss if self.loss is None else self.loss(output, self.batch)
        return found


def make(case: Case, device: torch.device, dtype: str, seed: int) -> Made:
    """Equal weights and equal batches for equal arguments. `InputError` where a package is missing."""
    torch.manual_seed(seed)
    model = (_encoder if case.architecture == "TransformerEncoder" else _transformer)(case, device, dtype)
    model.to(device=device).train(case.trains)
    generator = torch.Generator().manual_seed(seed)
    batch = _batch(case, model, generator, DTYPES[dtype], device)
    return Made(model, batch, _squared_difference if case.inputs == VECTORS else None)


def _transformer(case: Case, device: torch.device, dtype: str) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f"{case.model} is a model of transformers: pip install 'fuseline[transformers]'."
        ) from error
    kind = getattr(transformers, case.architecture)
    config = kind.config_class(**case.config)
    if case.inputs == CAUSAL:
        config.use_cache = False
    with device:
        model: nn.Module = kind._from_config(config, dtype=DTYPES[dtype])
    return model


def _encoder(case: Case, device: torch.device, dtype: str) -> nn.Module:
    sizes = case.config
    with device:
        layer = nn.TransformerEncoderLayer(
            sizes["embed_dim"],
            sizes["num_heads"],
            sizes["ffn_dim"],
            dropout=case.dropout,
            batch_first=True,
            dtype=DTYPES[dtype],
        )
        return nn.TransformerEncoder(layer, sizes["num_layers"], enable_nested_tensor=False)


def _batch(
    case: Case, model: nn.Module, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> Any:
    if case.inputs == VECTORS:
        vectors = torch.randn(case.batch, case.seqlen, case.config["embed_dim"], generator=generator)
        return vectors.to(device, dtype)
    config: Any = model.config
    if case.inputs == IMAGES:
        sizes = config.num_channels, config.image_size, config.image_size
        images = torch.randn(case.batch, *sizes, generator=generator).to(device, dtype)
        labels = torch.randint(config.num_labels, (case.batch,), generator=generator)
        return {"pixel_values": images, "labels": labels.to(device)}
    tokens = torch.randint(config.vocab_size, (case.batch, case.seqlen), generator=generator).to(device)
    if not case.trains:
        # A prompt's last logits are all that its next token needs.
        return {"input_ids": tokens, **({"logits_to_keep": 1} if case.inputs == CAUSAL else {})}
    if case.inputs == MASKED:
        predicted = (torch.rand(tokens.shape, generator=generator) < _PREDICTED).to(device)
        return {"input_ids": tokens, "labels": tokens.masked_fill(~predicted, _NOT_PREDICTED)}
    return {"input_ids": tokens, "labels": tokens}


def _squared_difference(output: Tensor, batch: Tensor) -> Tensor:
    return F.mse_loss(output.float(), batch.float())
