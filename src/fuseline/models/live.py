"""A decoder of `transformers` that is in memory, as Fuseline's own model, which has a static cache."""

from __future__ import annotations

import torch
from torch import nn

from fuseline.errors import InputError
from fuseline.models.gpt_checkpoints import assemble
from fuseline.models.gpt_hugging_face import gpt2_config, to_nanogpt
from fuseline.models.llama_hugging_face import MODEL_TYPES, fill_llama, llama_config
from fuseline.models.pretrained import LanguageModel


def from_live(model: nn.Module) -> LanguageModel:
    """Fuseline's model with copies of the weights of `model`: in eval mode, on its device, in its dtype.

    `model` is a `transformers` decoder with its head: GPT-2, Llama, Mistral, Qwen2 or Qwen3.

    Raises `InputError` for other models, and for one whose weights are not those that its config describes
    (adapters, quantized layers).
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    name = type(model).__name__
    if kind not in ("gpt2", *MODEL_TYPES):
        raise InputError(
            f"{name} is not a decoder that Fuseline has a model for: gpt2, {', '.join(MODEL_TYPES)}."
        )
    assert config is not None
    fields = config.to_dict()
    weights = {path: weight.detach() for path, weight in model.state_dict().items()}
    first = next(weight for weight in weights.values() if weight.is_floating_point())
    if kind == "gpt2":
        made = assemble(gpt2_config(fields, name), to_nanogpt(weights), name)
        return made.to(device=first.device, dtype=first.dtype).eval()
    with torch.no_grad():
        return fill_llama(llama_config(fields, name), weights.items(), name, device=first.device)
