"""Translating many sentences: longest first in batches, by greedy or beam search."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fuseline.generation.beam_search import beam_search
from fuseline.generation.writers import TranslationModel, writer_of

# A translation may be this much longer than its source before it is cut off.
_LONGER, _MORE = 1.5, 10


@torch.no_grad()
def translate_tokens(
    model: TranslationModel,
    prompts: Sequence[list[int]],
    *,
    start_id: int,
    eos_id: int,
    beams: int = 1,
    length_penalty: float = 1.0,
    batch_size: int = 128,
    progress: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """The translation of each prompt (see `writer_of`), without its end. `progress` is told how many are
    done.

    Sentences of like length share a batch. The model is in eval mode meanwhile, and as it was afterwards.
    """
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    found: list[list[int]] = [[] for _ in prompts]
    was_training = model.training
    model.eval()
    try:
        for begin in range(0, len(order), batch_size):
            members = order[begin : begin + batch_size]
            batch = [prompts[i] for i in members]
            texts_BT = beam_search(
                writer_of(model, batch, start_id),
                beams=beams,
                eos_id=eos_id,
                max_new_tokens=int(len(batch[0]) * _LONGER) + _MORE,
                length_penalty=length_penalty,
            )
            for i, text in zip(members, texts_BT.tolist(), strict=True):
                found[i] = text[: text.index(eos_id)] if eos_id in text else text
            if progress is not None:
                progress(begin + len(members))
    finally:
        model.train(was_training)
    return found
