"""What a translation run is made of, as data: one schema for Python, files and the command line.

Free of torch, so that `fuseline train translate --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Optional

from fuseline.errors import unknown_name
from fuseline.models.translation_config import TranslationConfig
from fuseline.training import schema
from fuseline.training.schema import changed, check_bounds, check_optimizer_state, check_seed, described


@dataclass(frozen=True)
class TranslateConfig:
    """A translation model, its data, and how it is trained. What each field means stands in its metadata.

    The defaults are the preset `tiny`. Raises `InputError` for values that cannot be.
    """

    data: str = described(
        "grammar",
        "grammar (embedded German-English), multi30k, iwslt14, a folder with train.de and train.en, "
        "two files a,b, or a TSV file",
    )
    source: str = described("de", "language to translate from")
    target: str = described("en", "language to translate to")
    vocab_size: int = described(800, "size of the BPE vocabulary that both languages share")
    bpe_dropout: float = described(0.0, "share of merges left out at random while training")
    bpe_variants: int = described(8, "ways that the training text is cut with --bpe-dropout")

    architecture: str = described("encoder-decoder", "decoder-only or encoder-decoder")
    num_layers: int = described(2, "blocks of the decoder, and as many of the encoder")
    num_heads: int = described(4, "attention heads; must divide embed_dim")
    embed_dim: int = described(128, "width of the residual stream")
    ffn_dim: int = described(256, "width inside the feed-forward layers")
    length: int = described(64, "longest sequence in tokens (decoder-only: source and target together)")
    dropout: float = described(0.0, "dropout everywhere the model has one")
    norm_first: bool = described(True, "norm before each branch; False: after each sum, as the original")
    tied: bool = described(True, "share the token vectors with the head")
    fused: bool = described(True, "compute the memory-bound part by Fuseline's ops")
    unfused: str = described("formulas", "what --no-fused takes: formulas (operator by operator) or torch")

    label_smoothing: float = described(0.0, "share of each target spread over the vocabulary")
    bucketed: bool = described(
        True, "batches of like length; False: every sequence padded to the full length"
    )
    max_tokens: int = described(2048, "tokens a micro-batch and side, padding included")
    accumulation: int = described(1, "micro-batches a step, over all processes together")
    epochs: float = described(2.0, "passes over the training pairs")
    steps: Optional[int] = described(None, "optimizer steps, in place of epochs")
    minutes: Optional[float] = described(
        None, "stop after this much training time (compiling, validating and saving not counted)"
    )
    patience: Optional[int] = described(
        None, "stop after this many validations in a row that found no better weights"
    )
    learning_rate: float = described(3e-3, "highest learning rate")
    min_learning_rate: float = described(3e-5, "learning rate at the end of the cosine")
    warmup_steps: int = described(100, "steps of linear warm-up")
    weight_decay: float = described(0.01, "decay of matrices and embeddings")
    beta1: float = described(0.9, "Adam's first decay rate")
    beta2: float = described(0.98, "Adam's second decay rate")
    grad_clip: float = described(1.0, "largest gradient norm; 0 does not clip")
    average: float = described(0.0, "decay of the running average of the weights that translates; 0: none")

    optimizer_state: str = described("fp32", "how AdamW keeps its moments: fp32, bf16 or 8bit")
    arena: bool = described(False, "all weights, and all of AdamW's moments, in one stretch of memory each")
    precision: str = described(
        "auto",
        "fp32, tf32, bf16, fp16, or fp8 (bf16, linear layers in fp8 where faster); auto: bf16 on a GPU that "
        "has it, else fp32",
    )
    execution: str = described(
        "auto",
        "eager, inductor, cudagraphs, reduce-overhead, graph, inductor-graph; auto: graph on a GPU "
        "(a compiler would compile every length anew)",
    )
    deterministic: Optional[bool] = described(
        None, "the same bits in each run, resumed or not (default: True on a CPU, where it costs nothing)"
    )
    seed: int = described(1337, "seed of weights, batches and dropout")

    log_interval: int = described(20, "steps between two looks at the device")
    eval_epochs: float = described(1.0, "epochs between validations and checkpoints")
    checkpoint_seconds: Optional[float] = described(None, "also a checkpoint whenever this time has passed")
    bleu: bool = described(True, "BLEU on the validation pairs (greedy) and, at the end, on the test pairs")
    beams: int = described(5, "beams of the search that translates the test pairs")
    length_penalty: float = described(1.0, "exponent of the length penalty; above 1 favours longer texts")
    tensorboard: bool = described(False, "write TensorBoard event files too")
    wandb: Optional[str] = described(None, "project to log to on Weights & Biases too")

    def __post_init__(self) -> None:
        check_bounds(
            self,
            least=dict.fromkeys(("max_tokens", "accumulation", "log_interval", "beams", "bpe_variants"), 1),
            positive=(
                *("steps", "minutes", "patience", "checkpoint_seconds", "learning_rate"),
                *("epochs", "eval_epochs"),
            ),
            shares=("beta1", "beta2", "bpe_dropout", "average"),
            not_negative=("min_learning_rate", "warmup_steps", "weight_decay", "grad_clip", "length_penalty"),
        )
        check_seed(self.seed)
        check_optimizer_state(self.optimizer_state, self.precision)
        self.model_config(self.vocab_size)

    @property
    def kernels(self) -> str:
        """Whose kernels compute the step, in words."""
        return "fused ops of fuseline" if self.fused else f"unfused: {self.unfused}"

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
        "patience",
        "arena",
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


def as_dict(config: TranslateConfig) -> dict[str, Any]:
    """The config as plain values, for files and checkpoints; `TranslateConfig(**d)` makes it again."""
    return asdict(config)


def continued(saved: TranslateConfig, overrides: Mapping[str, Any]) -> TranslateConfig:
    """`saved` resumed with `overrides`; `InputError` for one that would make it another run."""
    return schema.continued(saved, overrides, free=FREE_ON_RESUME, instead="begin a new run")
