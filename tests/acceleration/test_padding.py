"""What is padded and how, and the proof that a model takes no notice: models with traps must fail it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fuseline.acceleration.lengths import Lengths, fits, rounded_up
from fuseline.acceleration.padding import half, kind_of, longest_of, pad_token, padded, why_not_padded
from fuseline.acceleration.padding_proof import NothingProvedError

from .padded_models import Reader, batch_of, make_step, recorded_on_a_cpu


def test_every_tensor_is_padded_with_what_nobody_reads() -> None:
    batch = {
        "input_ids": torch.tensor([[4, 5], [6, 7]], dtype=torch.int32),
        "attention_mask": torch.tensor([[True, True], [True, False]]),
        "labels": torch.tensor([[4, 5], [6, -100]]),
        "token_type_ids": torch.tensor([[0, 1], [1, 1]]),
        "position_ids": torch.tensor([[3, 4]]),
        "num_items_in_batch": torch.tensor(3),
        "use_cache": False,
    }
    assert why_not_padded(batch) is None
    longer = padded(batch, 4, 9)
    assert list(longer) == list(batch)
    assert longer["input_ids"].tolist() == [[4, 5, 9, 9], [6, 7, 9, 9]]
    assert longer["attention_mask"].tolist() == [[True, True, False, False], [True, False, False, False]]
    assert longer["labels"].tolist() == [[4, 5, -100, -100], [6, -100, -100, -100]]
    assert longer["token_type_ids"].tolist() == [[0, 1, 0, 0], [1, 1, 0, 0]]
    assert longer["position_ids"].tolist() == [[3, 4, 0, 0]]
    assert longer["num_items_in_batch"] == 3
    assert longer["use_cache"] is False
    for name, value in batch.items():
        assert not isinstance(value, torch.Tensor) or longer[name].dtype is value.dtype


MASK = torch.ones(3, 8, dtype=torch.long)
GIVEN = {"input_ids": MASK, "attention_mask": MASK}


@pytest.mark.parametrize(
    "batch, why",
    [
        ((MASK, MASK), "no attention_mask"),
        ({"input_ids": MASK, "attention_mask": None}, "no attention_mask"),
        ({"input_ids": MASK, "attention_mask": torch.ones(3, 1, 8, 8)}, "not one number for each position"),
        ({"input_ids": MASK, "attention_mask": MASK.float()}, "not one number for each position"),
        ({**GIVEN, "inputs_embeds": torch.ones(3, 8, 4)}, "how to pad inputs_embeds"),
        ({**GIVEN, "cache_position": torch.arange(8)}, "how to pad cache_position"),
        ({**GIVEN, "bias": {"of": [torch.ones(2, 8, 8)]}}, "how to pad bias"),
        ({**GIVEN, "labels": torch.ones(3, 8)}, "how to pad labels"),
        ({**GIVEN, "labels": torch.ones(3, 5, dtype=torch.long)}, "its labels have the shape"),
        ({**GIVEN, "labels": torch.ones(3, dtype=torch.long)}, None),
        ({**GIVEN, "labels": torch.ones(3, 5)}, None),
        ({"attention_mask": MASK[:, :3], "labels": torch.ones(3, dtype=torch.long)}, None),
        ({**GIVEN, "pixels": torch.ones(3, 2, 5)}, None),
    ],
)
def test_what_is_not_padded(batch: Any, why: str | None) -> None:
    found = why_not_padded(batch)
    assert why in found if why else found is None


def test_a_kind_is_all_but_the_length() -> None:
    kind = kind_of(batch_of(7))
    assert kind == kind_of(batch_of(30, full=True))
    assert kind != kind_of(batch_of(7, rows=4))
    assert kind != kind_of({**batch_of(7), "use_cache": False})
    assert kind != kind_of({**batch_of(7), "labels": torch.ones(3, dtype=torch.long)})
    assert kind != kind_of({name: value.int() for name, value in batch_of(7).items()})


def test_the_half_that_shows_something() -> None:
    batch = batch_of(9)
    assert torch.equal(half(batch)["input_ids"], batch["input_ids"][:, :5])
    left = batch_of(9, left=True)
    left["attention_mask"][2, :6] = 0
    assert torch.equal(half(left)["attention_mask"], left["attention_mask"][:, 4:])
    prompted = batch_of(9, full=True)
    prompted["labels"][:, :5] = -100
    assert torch.equal(half(prompted)["labels"], prompted["labels"][:, 4:])
    classes = {**batch_of(5), "labels": torch.tensor([0, 1, 0])}
    assert torch.equal(half(classes)["labels"], classes["labels"])


def test_what_a_configuration_says() -> None:
    model = nn.Linear(1, 1)
    assert (pad_token(model), longest_of(model)) == (0, float("inf"))
    model.config = type("Config", (), {"pad_token_id": 3, "n_positions": 64})()  # type: ignore[assignment]
    assert (pad_token(model), longest_of(model)) == (3, 64)
    model.config = type("Config", (), {"pad_token_id": None})()  # type: ignore[assignment]
    assert pad_token(model) == 0


def test_lengths_that_are_recorded() -> None:
    lengths = [1, 32, 33, 100, 128, 129, 250, 257, 510, 513, 1025]
    assert [rounded_up(n, 600) for n in lengths] == [32, 32, 64, 128, 128, 160, 256, 320, 512, 600, 1025]
    for length in range(1, 3000):
        up = rounded_up(length, float("inf"))
        assert fits([length], up)
        assert rounded_up(up, float("inf")) == up
    assert fits([100], 132)
    assert not fits([100], 133)
    assert not fits([100], 99)
    assert fits([400, 300], 420)
    assert not fits([400, 100], 400)


def fitted(
    lengths: Lengths, *given: int, room: bool = True, why: Any = None, full: bool = False
) -> int | None:
    """The length at which batches of these lengths run; None as they are. `full`: masks that hide nothing."""

    def measure(found: Any, wanted: Any, batch: Any, *, exact: bool) -> str | None:
        if isinstance(why, Exception):
            raise why
        return why

    batches = [batch_of(length, full=full) for length in given]
    masks = tuple(((3, length) if full else None,) for length in given)
    found = lengths.fit(batches, masks, lambda batch, exact: None, measure, room=room)
    if found is None:
        return None
    longer, hiding = found
    assert hiding == ((None,),) * len(given), "one recording is for every mask"
    (length,) = {batch["labels"].shape[1] for batch in longer}
    return length


def test_a_recording_without_its_mask_takes_no_padding() -> None:
    lengths = Lengths(nn.Linear(1, 1))
    assert fitted(lengths, 70, full=True) is None
    assert fitted(lengths, 65, full=True) == 96, "the recording of 70 leaves out its mask"
    assert fitted(lengths, 96, full=True) == 96
    assert fitted(lengths, 70) is None, "recorded again, with its mask"
    assert fitted(lengths, 65, full=True) == 70


def test_the_rule() -> None:
    lengths = Lengths(nn.Linear(1, 1))
    assert [fitted(lengths, 70) for _ in range(2)] == [None, None], "one length: nothing is padded"
    assert fitted(lengths, 60) == 70, "it is recorded, and a little longer"
    assert fitted(lengths, 71) == 96
    assert fitted(lengths, 70) is None
    assert fitted(lengths, 300) == 320
    assert fitted(lengths, 280) == 320, "recorded comes before fresh"
    assert fitted(lengths, 200, room=False) is None
    assert "no further one can be recorded" in lengths.why
    assert fitted(lengths, 90, room=False) == 96
    assert not lengths.reason


def test_micro_batches_have_one_length() -> None:
    lengths = Lengths(nn.Linear(1, 1))
    assert fitted(lengths, 60, 50) == 64
    assert fitted(lengths, 64, 64) == 64
    assert fitted(lengths, 50, 50) == 64
    assert fitted(lengths, 300, 100) is None, "padding would add half of it"
    assert fitted(lengths, 300, 270) == 320


def test_a_length_that_cannot_run_is_left_out_and_shorter_ones_are_not() -> None:
    lengths = Lengths(nn.Linear(1, 1))
    fitted(lengths, 40)
    assert fitted(lengths, 100, why=IndexError("out of range")) is None
    assert "could not run with 128 positions (out of range)" in lengths.why
    assert fitted(lengths, 100) is None
    assert fitted(lengths, 50) == 64


def test_batches_that_show_nothing_are_not_tried_for_ever() -> None:
    lengths = Lengths(nn.Linear(1, 1))
    fitted(lengths, 40)
    nothing = NothingProvedError("it is not finite")
    assert fitted(lengths, 50, why=nothing) is None
    assert fitted(lengths, 50) == 64, "the next batch may show something"
    for length in (90, 100):
        assert not lengths.reason
        assert fitted(lengths, length, why=nothing) is None
    assert lengths.reason == "it is not finite"
    assert fitted(lengths, 100) is None


def test_a_model_that_takes_notice_is_never_padded() -> None:
    lengths = Lengths(nn.Linear(1, 1))
    fitted(lengths, 40)
    assert fitted(lengths, 50, why="it differs") is None
    assert fitted(lengths, 90) is None
    assert lengths.reason == "it differs"
    off = Lengths(nn.Linear(1, 1), pad=False)
    assert [fitted(off, 40), fitted(off, 50)] == [None, None]


TRAPS: dict[str, tuple[dict[str, Any], str | None]] = {
    "heeds its mask": ({}, None),
    "drops": ({"p": 0.3}, None),
    "ignores its mask": ({"heeds": False}, "its mask does not hide"),
    "ignores its mask and drops": ({"heeds": False, "p": 0.3}, "its mask does not hide"),
    "takes a mean over all positions": ({"pools": True}, "its mask does not hide"),
    "counts statistics of all positions": ({"statistics": True}, "its mask does not hide"),
    "counts statistics and drops": ({"statistics": True, "p": 0.3}, "its mask does not hide"),
    "divides its loss by all positions": ({"per_position": True}, "its mask does not hide"),
    "drops even in evaluation": ({"always_drops": True}, "random numbers even in evaluation"),
    "has no label that is ignored": ({"ignored": -1}, "could not run with 64 positions"),
    "embeds its labels": ({"embeds_labels": True}, "could not run with 64 positions"),
    "has too few positions": ({"positions": 63}, "could not run with 64 positions"),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TRAPS)
def test_a_step_is_padded_only_where_it_changes_nothing(name: str, precision: str) -> None:
    """One position is added to 63: even the wide limit of bf16 must not hide what it changes."""
    options, why = TRAPS[name]
    model = Reader(**options).train()
    before = copy.deepcopy(model)
    with recorded_on_a_cpu() as made:
        step = make_step(model, precision)
        for group in step.optimizer.param_groups:
            group["lr"] = 0.0
        step(batch_of(40, full=True))
        given, buffers = batch_of(63, full=True), copy.deepcopy(dict(model.named_buffers()))
        random = torch.get_rng_state()
        (batch,), _ = step._fitted((given,), True)
    assert torch.equal(torch.get_rng_state(), random)
    if why is None:
        assert batch["labels"].shape[1] == 64, step.lengths.why
        assert not step.lengths.reason
    else:
        assert why in step.lengths.reason
        assert why in step.lengths.why
        assert batch["labels"].shape[1] == 63
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name])
    assert all(module.training for module in model.modules())
    for one, other in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(one, other)
    assert made == [40]
