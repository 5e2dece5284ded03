"""A training step to time, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fuseline.bench.drawn import LABEL, check_count, dealt, drawn_lengths, with_as_many_tokens
from fuseline.errors import InputError, unknown_name
from fuseline.models import llama_config
from fuseline.models.gpt_config import PRESETS, GPTConfig, preset
from fuseline.models.llama_config import LlamaConfig

# By preset: its own batch sizes.
_BATCHES = {
    "tiny": (8,),
    "shakespeare": (64,),
    "gpt2": (16, 64),
    "gpt2-medium": (16,),
    "gpt2-xl": (4,),
    "llama-tiny": (8,),
    "llama-1b": (4,),
}
_VOCAB_MULTIPLE = 64
_SHORTEST_DRAWN = 8  # of a model's longest sequence, one of so many parts


@dataclass(frozen=True)
class StepCase:
    """A step of `batch` sequences of `seqlen` tokens, which may be a `drawn` length, of one of our presets of
    GPT or Llama."""

    preset: str
    batch: int
    seqlen: int
    precision: str = "bf16"
    dropout: float = 0.0
    bias: bool = True
    drawn: bool = False

    @property
    def config(self) -> GPTConfig | LlamaConfig:
        """Ours; a GPT's vocabulary is padded to a multiple of 64, which changes no number."""
        if self.preset in llama_config.PRESETS:
            return llama_config.preset(self.preset, block_size=self.seqlen)
        return self.gpt

    @property
    def gpt(self) -> GPTConfig:
        return replace(
            preset(self.preset), dropout=self.dropout, bias=self.bias, vocab_multiple=_VOCAB_MULTIPLE
        )

    @property
    def nanogpt_vocab_size(self) -> int:
        """nanoGPT pads GPT-2's vocabulary to 50,304, and a character model's not at all."""
        config = self.gpt
        return config.padded_vocab_size if config.vocab_size > 1000 else config.vocab_size

    def as_record(self) -> dict[str, str | int | float | bool]:
        return {
            "preset": self.preset,
            "task": "train",
            "batch": self.batch,
            "seqlen_q": self.seqlen,
            "dtype": self.precision,
            "dropout": self.dropout,
            "bias": self.bias,
            **({LABEL: True} if self.drawn else {}),
        }

    def __str__(self) -> str:
        extras = f", dropout {self.dropout:g}" if self.dropout else ""
        return (
            f"{self.preset}, {self.batch} x {self.seqlen}, {self.precision}{extras}"
            + ("" if self.bias else ", no biases")
            + (", drawn" if self.drawn else "")
        )


def find_cases(
    presets: Iterable[str],
    *,
    batch_size: int | None = None,
    seqlen: int | None = None,
    precision: str = "bf16",
    dropout: float | None = None,
    bias: bool = True,
    drawn: int = 0,
    seed: int = 1337,
) -> tuple[StepCase, ...]:
    """The cases of these presets; sizes that are not given are the preset's own. Then those with `drawn`
    sequence lengths from `seed`, dealt out to the presets, of as many tokens as the preset's first batch."""
    check_count(drawn)
    if precision == "fp16":
        raise InputError("bench step has no fp16: nanoGPT's step would need a gradient scaler. Take bf16.")
    if precision == "fp8":
        raise InputError("The peer fuseline-fp8 computes in fp8, beside others in bf16: take bf16.")
    presets, cases, at_random = tuple(presets), [], []
    draws = dealt(drawn, presets)
    for name in presets:
        if name not in PRESETS and name not in llama_config.PRESETS:
            raise unknown_name("preset", name, [*PRESETS, *llama_config.PRESETS])
        own = preset(name) if name in PRESETS else llama_config.preset(name)
        length = own.block_size if seqlen is None else seqlen
        if not 1 <= length <= own.block_size:
            raise InputError(f"--seqlen {length}: {name} takes 1 to {own.block_size} tokens.")
        if batch_size is not None and batch_size < 1:
            raise InputError(f"--batch-size {batch_size}: a step takes one sequence or more.")
        batches = _BATCHES.get(name, (16,)) if batch_size is None else (batch_size,)
        p, biased = 0.0, False  # a Llama has neither dropout nor biases
        if isinstance(own, GPTConfig):
            p, biased = own.dropout if dropout is None else dropout, bias
        cases += [StepCase(name, batch, length, precision, p, biased) for batch in batches]
        lowest = max(1, own.block_size // _SHORTEST_DRAWN)
        for n in drawn_lengths(seed, lowest, own.block_size, (length, own.block_size), count=draws[name]):
            rows = with_as_many_tokens(batches[0], length, n)
            at_random.append(StepCase(name, rows, n, precision, p, biased, drawn=True))
    return (*cases, *at_random)
