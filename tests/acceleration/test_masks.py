"""Masks that hide nothing are left out of a recording; those that hide something never are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuseline.acceleration.masks import MasksLeftOut, hides_nothing

transformers = pytest.importorskip("transformers")
from transformers import masking_utils  # noqa: E402

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
TOKENS = torch.randint(1, 64, (2, 6), generator=torch.Generator().manual_seed(0))
FULL, PADDED = torch.ones(2, 6, dtype=torch.long), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
TWO_SEQUENCES = torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(2, -1).contiguous()

BATCHES = {
    "no mask": ({}, True),
    "a full mask": ({"attention_mask": FULL}, True),
    "a padded mask": ({"attention_mask": PADDED}, False),
    "two sequences in a row": ({"position_ids": TWO_SEQUENCES}, False),
}


def made(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "causal":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, use_cache=False)).eval()
    return transformers.BertModel(transformers.BertConfig(**SIZES)).eval()


@pytest.fixture
def masks_seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every attention: whether it was given a mask."""
    seen: list[bool] = []
    own = torch.nn.functional.scaled_dot_product_attention

    def attention(*args: Any, attn_mask: Any = None, **kwargs: Any) -> torch.Tensor:
        seen.append(attn_mask is not None)
        return own(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    return seen


@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
@pytest.mark.parametrize("name", BATCHES)
def test_a_recording_takes_the_masks_of_an_eager_step(
    name: str, kind: str, masks_seen: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, left_out = BATCHES[name]
    if kind == "bidirectional" and "position_ids" in batch:
        left_out = True  # positions are no mask there
    model, masks = made(kind), MasksLeftOut()
    expected = model(TOKENS, **batch)[0]
    assert masks_seen == [not left_out] * 2
    own = vars(masking_utils).copy()
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)  # noqa: B023
        masks_seen.clear()
        with masks.inside(hides_nothing({"input_ids": TOKENS, **batch})):
            found = model(TOKENS, **batch)[0]
        assert masks_seen == [not left_out] * 2
        assert torch.allclose(found, expected, atol=1e-6)
    assert vars(masking_utils) == own


def test_a_mask_is_left_out_only_where_the_batch_says_that_it_hides_nothing(masks_seen: list[bool]) -> None:
    model, masks = made("causal"), MasksLeftOut()
    for full in ((), (None,), ((3, 6),)):
        with masks.inside(full):
            model(TOKENS, attention_mask=FULL)
    assert masks_seen == [True] * 6


def test_the_key_tells_what_was_seen() -> None:
    assert hides_nothing({"input_ids": TOKENS}) == ()
    assert hides_nothing({"input_ids": TOKENS, "attention_mask": FULL}) == ((2, 6),)
    assert hides_nothing({"attention_mask": PADDED, "other_mask": FULL > 0}) == (None, (2, 6))
    assert hides_nothing({"attention_mask": None, "mask": torch.ones(2, 1, 6, 6)}) == (None,)
    assert hides_nothing((TOKENS, FULL)) == ()
