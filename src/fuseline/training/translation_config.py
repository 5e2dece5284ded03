"""What a translation run is made of, as data: one schema for Python, files and the command line.

Free of torch, so that `fuseline train translate --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Optional

from fuseline.errors import InputError, unknown_name
from fuseline.models.translation_config import TranslationConfig


def _field(default: Any, says: str) -> Any:
    return field(default=default, metadata={"help": says})


@dataclass(frozen=True)
class TranslateConfig:
    """A translation model, its data, and how it is trained. What each field means stands in its metadata.

    The defaults are the preset `tiny`. Raises `InputError` for values that cannot be.
    """

    data: str = _field(
        "grammar",
        "grammar (embedded German-English), multi30k, iwslt14, a folder with train.de and train.en, "
        "two files a,b, or a TSV file",
    )
    source: str = _field("de", "language to translate from")
    target: str = _field("en", "language to translate to")
    vocab_size: int = _field(800, "size of the BPE vocabulary that both languages share")
    bpe_dropout: float = _field(0.0, "share of merges left out at random while training")
    bpe_variants: int = _field(8, "ways that the training text is cut with --bpe-dropout")

    architecture: str = _field("encoder-decoder", "decoder-only or encoder-decoder")
    num_layers: int = _field(2, "blocks of the decoder, and as many of the encoder")
    num_heads: int = _field(4, "attention heads; must divide embed_dim")
    embed_dim: int = _field(128, "width of the residual stream")
    ffn_dim: int = _field(256, "width inside the feed-forward layers")
    length: int = _field(64, "longest sequence in tokens (decoder-only: source and target together)")
    dropout: float = _field(0.0, "dropout everywhere the model has one")
    norm_first: bool = _field(True, "norm before each branch; False: after each sum, as the original")
    tied: bool = _field(True, "share the token vectors with the head")
    fused: bool = _field(True, "compute the memory-bound part by Fuseline's ops")
    unfused: str = _field("formulas", "what --no-fused takes: formulas (operator by operator) or torch")

    label_smoothing: float = _field(0.0, "share of each target spread over the vocabulary")
    bucketed: bool = _field(True, "batches of like length; False: every sequence padded to the full length")
    max_tokens: int = _field(2048, "tokens a micro-batch and side, padding included")
    accumulation: int = _field(1, "micro-batches a step, over all processes together")
    epochs: float = _field(2.0, "passes over the training pairs")
    steps: Optional[int] = _field(None, "optimizer steps, in place of epochs")
    minutes: Optional[float] = _field(
        None, "stop after this much training time (compiling, validating and saving not counted)"
    )
    learning_rate: float = _field(3e-3, "highest learning rate")
    min_learning_rate: float = _field(3e-5, "learning rate at the end of the cosine")
    warmup_steps: int = _field(100, "steps of linear warm-up")
    weight_decay: float = _field(0.01, "decay of matrices and embeddings")
    beta1: float = _field(0.9, "Adam's first decay rate")
    beta2: float = _field(0.98, "Adam's second decay rate")
    grad_clip: float = _field(1.0, "largest gradient norm; 0 does not clip")
    average: float = _field(0.0, "decay of the running average of the weights that translates; 0: none")

    precision: str = _field("auto", "fp32, tf32, bf16, fp16; auto: bf16 on a GPU that has it, else fp32")
    execution: str = _field(
        "auto",
        "eager, inductor, cudagraphs, reduce-overhead, graph, inductor-graph; auto: graph on a GPU "
        "(a compiler would compile every length anew)",
    )
    deterministic: bool = _field(True, "repeatable to the bit, also over a resume")
    seed: int = _field(1337, "seed of weights, batches and dropout")

    log_interval: int = _field(20, "steps between two looks at the device")
    eval_epochs: float = _field(1.0, "epochs between validations and checkpoints")
    checkpoint_seconds: Optional[float] = _field(None, "also a checkpoint whenever this time has passed")
    bleu: bool = _field(True, "BLEU on the validation pairs (greedy) and, at the end, on the test pairs")
    beams: int = _field(5, "beams of the search that translates the test pairs")
    length_penalty: float = _field(1.0, "exponent of the length penalty; above 1 favours longer texts")
    tensorboard: bool = _field(False, "write TensorBoard event files too")
    wandb: Optional[str] = _field(None, "project to log to on Weights & Biases too")

    def __post_init__(self) -> None:
        for name in ("max_tokens", "accumulation", "log_interval", "beams", "bpe_variants"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be 1 or more.")
        for name in ("steps", "minutes", "checkpoint_seconds", "learning_rate", "epochs", "eval_epochs"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"{name} is {value}; it must be more than 0.")
        for name in ("beta1", "beta2", "bpe_dropout", "average"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must lie in 0..1, without the 1.")
        for name in ("min_learning_rate", "warmup_steps", "weight_decay", "grad_clip", "length_penalty"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}; it must not be negative.")
        self.model_config(self.vocab_size)

    def model_config(self, vocab_size: int) -> TranslationConfig:
        """The model's part, for a vocabulary of that size."""
        shared = {f.name for f in fields(TranslationConfig)} - {"vocab_size", "pad_id"}
        return TranslationConfig(vocab_size=vocab_size, **{name: getattr(self, name) for name in shared})


# What may differ between a run and its continuation. All else decides the weights, and is the checkpoint's.
FREE_ON_RESUME = frozenset(
    {
        "epochs",
        "steps",
        "minutes",
        "execution",
        "deterministic",
        "log_interval",
        "eval_epochs",
        "checkpoint_seconds",
        "bleu",
        "beams",
        "length_penalty",
        "tensorboard",
        "wandb",
    }
)

# seed: the decoder-only model of the course that LightSeq2's kernels are taught in, its batch of 128
# sentences of 40 tokens. multi30k: chosen for 29,000 short pairs: little width, much dropout, words cut in
# several ways, averaged weights.
PRESETS: dict[str, TranslateConfig] = {
    "tiny": TranslateConfig(),
    "seed": TranslateConfig(
        data="multi30k",
        vocab_size=10_000,
        architecture="decoder-only",
        num_layers=4,
        num_heads=8,
        embed_dim=256,
        ffn_dim=256,
        length=40,
        dropout=0.1,
        tied=False,
        bucketed=False,
        max_tokens=128 * 40,
        epochs=20,
        learning_rate=1e-3,
        min_learning_rate=1e-5,
        warmup_steps=200,
        eval_epochs=5,
    ),
    "multi30k": TranslateConfig(
        data="multi30k",
        vocab_size=8000,
        bpe_dropout=0.1,
        bpe_variants=10,
        num_layers=4,
        num_heads=4,
        embed_dim=256,
        ffn_dim=512,
        length=96,
        dropout=0.3,
        label_smoothing=0.1,
        max_tokens=6144,
        epochs=120,
        learning_rate=1.5e-3,
        min_learning_rate=1e-5,
        warmup_steps=1000,
        weight_decay=0.01,
        average=0.999,
        log_interval=100,
        eval_epochs=10,
    ),
}


def preset(name: str, **overrides: Any) -> TranslateConfig:
    """The preset of that name, with `overrides` replacing its fields; `InputError` for an unknown name."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return changed(PRESETS[name], overrides)


def changed(config: TranslateConfig, overrides: Mapping[str, Any]) -> TranslateConfig:
    """`config` with some fields replaced; `InputError` for a field there is not."""
    known = [f.name for f in fields(TranslateConfig)]
    for name in overrides:
        if name not in known:
            raise unknown_name("training option", name, known)
    return replace(config, **overrides)


def as_dict(config: TranslateConfig) -> dict[str, Any]:
    """The config as plain values, for files and checkpoints; `TranslateConfig(**d)` makes it again."""
    return asdict(config)


def continued(saved: TranslateConfig, overrides: Mapping[str, Any]) -> TranslateConfig:
    """The config of a run taken up again, with `overrides` where they leave the weights' course alone.

    Raises:
        InputError: an override names a value that the checkpoint's run did not have and that would make
            this another run.
    """
    for name, value in overrides.items():
        if name not in FREE_ON_RESUME and value != getattr(saved, name, value):
            raise InputError(
                f"This run was begun with {name}={getattr(saved, name)!r}, and resuming cannot make it "
                f"{value!r}. Leave the option out, or begin a new run."
            )
    return changed(saved, overrides)
