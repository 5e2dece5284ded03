"""The models that are accelerated, with a batch and a task, as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fuseline.bench.drawn import LABEL, check_count, dealt, drawn_lengths, with_as_many_tokens
from fuseline.errors import unknown_name
from fuseline.records.record import Scalar

CAUSAL, MASKED, IMAGES, VECTORS = "causal", "masked", "images", "vectors"


@dataclass(frozen=True)
class Case:
    """A training step or a forward pass of one model.

    `architecture` is a class of transformers, made from `config` with random weights, or torch's own
    "TransformerEncoder". `inputs` is what the batch is made of: "causal" (tokens that are their own labels),
    "masked" (tokens, a seventh of them to be predicted), "images" with a class each, or "vectors". `seqlen`
    counts the positions of one example, an image's patches among them; it may be a `drawn` length.
    """

    name: str
    model: str
    architecture: str
    config: Mapping[str, Any] = field(hash=False)
    inputs: str
    batch: int
    seqlen: int
    task: str = "train"
    dropout: float = 0.0
    preset: str = "full"
    drawn: bool = False

    @property
    def trains(self) -> bool:
        return self.task == "train"

    def as_record(self, dtype: str) -> dict[str, Scalar]:
        return {
            "model": self.model,
            "task": self.task,
            "batch": self.batch,
            "seqlen_q": self.seqlen,
            "dtype": dtype,
            "dropout": self.dropout,
            "preset": self.preset,
            **({LABEL: True} if self.drawn else {}),
        }

    def __str__(self) -> str:
        extras = f", dropout {self.dropout:g}" if self.dropout else ""
        extras += ", drawn" if self.drawn else ""
        return f"{self.model}, {self.task}, {self.batch} x {self.seqlen}{extras}"


_LLAMA_1B = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_LLAMA_3_2_1B = {**_LLAMA_1B, "vocab_size": 128256}
_QWEN2_HALF_B = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_NO_DROPOUT_GPT2 = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
_ENCODER = {"embed_dim": 512, "num_heads": 8, "ffn_dim": 2048, "num_layers": 6}

_FULL = (
    Case("llama-1b", "Llama 1B", "LlamaForCausalLM", _LLAMA_1B, CAUSAL, 4, 2048),
    Case("llama3.2-1b", "Llama 3.2 1B", "LlamaForCausalLM", _LLAMA_3_2_1B, CAUSAL, 4, 2048),
    Case("qwen2-0.5b", "Qwen2 0.5B", "Qwen2ForCausalLM", _QWEN2_HALF_B, CAUSAL, 4, 2048),
    Case("gpt2", "GPT-2", "GPT2LMHeadModel", _NO_DROPOUT_GPT2, CAUSAL, 16, 1024),
    Case("bert-base", "BERT-base MLM", "BertForMaskedLM", {}, MASKED, 64, 128, dropout=0.1),
    Case("vit-b16", "ViT-B/16", "ViTForImageClassification", {"num_labels": 1000}, IMAGES, 64, 197),
    Case(
        "encoder",
        "nn.TransformerEncoder 512 x 6",
        "TransformerEncoder",
        _ENCODER,
        VECTORS,
        64,
        128,
        dropout=0.1,
    ),
    Case("bert-base-forward", "BERT-base", "BertModel", {}, MASKED, 1, 128, "forward"),
    Case("llama-1b-prefill", "Llama 1B", "LlamaForCausalLM", _LLAMA_1B, CAUSAL, 1, 512, "forward"),
)

_SMALL_LLAMA = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
_SMALL_BERT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_SMALL_VIT = {
    "num_labels": 10,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 16,
}
_SMALL_GPT2 = {**_NO_DROPOUT_GPT2, "vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}
_SMALL: Mapping[str, tuple[Mapping[str, Any], int, int]] = {
    "llama-1b": (_SMALL_LLAMA, 2, 16),
    "llama3.2-1b": (_SMALL_LLAMA, 2, 16),
    "qwen2-0.5b": (_SMALL_LLAMA, 2, 16),
    "gpt2": (_SMALL_GPT2, 2, 16),
    "bert-base": (_SMALL_BERT, 2, 16),
    "vit-b16": (_SMALL_VIT, 2, 5),
    "encoder": ({"embed_dim": 32, "num_heads": 4, "ffn_dim": 64, "num_layers": 2}, 2, 16),
    "bert-base-forward": (_SMALL_BERT, 1, 16),
    "llama-1b-prefill": (_SMALL_LLAMA, 1, 16),
}

PRESETS: Mapping[str, Mapping[str, Case]] = {
    "full": {case.name: case for case in _FULL},
    "small": {
        case.name: replace(
            case, model=f"{case.model}, shrunk", config=config, batch=batch, seqlen=seqlen, preset="small"
        )
        for case in _FULL
        for config, batch, seqlen in (_SMALL[case.name],)
    },
}
"""The cases by name: in the sizes that people train, and shrunk for a processor."""
CASES = tuple(PRESETS["full"])


_SHORTEST_DRAWN = 8  # of a case's own length, one of so many parts


def find_cases(names: Iterable[str], preset: str, drawn: int = 0, seed: int = 1337) -> tuple[Case, ...]:
    """The cases of those names in the order given, all if there is none, in the sizes of `preset`. Then those
    with `drawn` lengths from `seed`, dealt out to the cases whose length is not an image's: none longer than
    the case's own, and where it trains of about as many tokens."""
    check_count(drawn)
    if preset not in PRESETS:
        raise unknown_name("preset", preset, PRESETS)
    wanted = tuple(dict.fromkeys(names)) or CASES
    for name in wanted:
        if name not in CASES:
            raise unknown_name("case", name, CASES)
    found = [PRESETS[preset][name] for name in wanted]
    draws = dealt(drawn, [case.name for case in found if case.inputs != IMAGES])
    return (*found, *(other for case in found for other in _at_lengths(case, draws[case.name], seed)))


def _at_lengths(case: Case, count: int, seed: int) -> Iterator[Case]:
    lowest = max(1, case.seqlen // _SHORTEST_DRAWN)
    for n in drawn_lengths(seed, lowest, case.seqlen, (case.seqlen,), count=count):
        batch = with_as_many_tokens(case.batch, case.seqlen, n) if case.trains else case.batch
        yield replace(case, seqlen=n, batch=batch, drawn=True)
