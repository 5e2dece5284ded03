"""Models of `transformers` that drop: the same numbers as by torch's dropout with masks of the same seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fuseline.acceleration.handle import Acceleration

from .masked_models import masks_of_seeds

transformers = pytest.importorskip("transformers", reason="needs transformers to build its models")
pytestmark = pytest.mark.usefixtures("proofs_shared", "by_seeds")
Make = Callable[..., Acceleration]
IDS = torch.arange(18).view(2, 9)
SMALL = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"vocab_size": 99, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config), {"input_ids": IDS}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    return model, {"input_ids": IDS, "labels": IDS}


def bart() -> tuple[nn.Module, dict[str, Any]]:
    options = {"max_position_embeddings": 32, "activation_dropout": 0.1, "activation_function": "relu"}
    return transformers.BartModel(transformers.BartConfig(**SMALL, **options)), {"input_ids": IDS}


def gradients(model: nn.Module, batch: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    with masks_of_seeds():
        output = model(**batch)
    hidden = output.logits if hasattr(output, "logits") else output[0]
    model.zero_grad()
    (hidden * torch.linspace(-1, 1, hidden.shape[-1])).sum().backward()
    return [hidden.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    "make, sums, relus", [(gpt2, 2, 0), (t5, 5, 2), (bart, 5, 2)], ids=["gpt2", "t5", "bart"]
)
def test_the_same_masks_give_the_same_numbers(make: Any, sums: int, relus: int, keep_all: Make) -> None:
    model, batch = make()
    model.train()
    # T5's attention drops as its sums do, in torch's function.
    fast = keep_all(model, batch, **({"skip": "*Attention"} if make is t5 else {}))
    ops = [site.op for site in fast.kept]
    assert (ops.count("dropout_add_norm"), ops.count("dropout")) == (sums, relus)
    ours, theirs = gradients(model, batch), gradients(fast.undo(), batch)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-5
