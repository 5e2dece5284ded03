"""What a training run is made of, as data: one schema for Python, files and the command line.

Free of torch, so that `fuseline train gpt --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Optional

from fuseline.errors import InputError, unknown_name
from fuseline.models.gpt_config import GPTConfig
from fuseline.training import schema
from fuseline.training.schema import changed, check_bounds, check_optimizer_state, check_seed, described


@dataclass(frozen=True)
class TrainConfig:
    """A GPT, its data, and how it is trained. `help(field)` of each stands in the field's metadata.

    The defaults are the preset `tiny`. Raises `InputError` for values that cannot be.
    """

    data: str = described(
        "python",
        "python (the interpreter's own standard library), python-packages (and all that is installed), "
        "shakespeare, openwebtext, or a path",
    )
    tokenizer: str = described("bpe", "char, bpe (trained on the data) or gpt2")
    vocab_size: Optional[int] = described(None, "size of a bpe vocabulary (default: 1000)")
    validation_fraction: float = described(0.1, "share of the text held back for validation")

    num_layers: int = described(4, "blocks")
    num_heads: int = described(4, "attention heads; must divide embed_dim")
    embed_dim: int = described(128, "width of the residual stream")
    block_size: int = described(128, "tokens a sequence")
    dropout: float = described(0.0, "dropout everywhere the model has one")
    bias: bool = described(False, "biases in linear layers and norms")
    vocab_multiple: int = described(1, "pad the embedding's rows to a multiple of this")
    attention: str = described("pick", "attention backend; pick: the fastest known")
    norm: str = described(
        "auto",
        "whose kernels compute norms, MLPs and the sums around them: torch or fuseline; auto: fuseline on a "
        "GPU in 16 bits if torch.compile compiles nothing, else torch",
    )
    loss: str = described(
        "auto",
        "the cross-entropy in training: float32 (torch's), logits (torch's, in their dtype), fuseline, or "
        "fuseline-linear (without all logits in memory); auto: fuseline-linear if norm is fuseline, else "
        "float32",
    )
    activation: str = described("gelu", "gelu, or gelu_tanh as OpenAI's GPT-2 has it")

    batch_size: int = described(16, "sequences a micro-batch")
    accumulation: int = described(1, "micro-batches a step, over all processes together")
    steps: int = described(300, "optimizer steps")
    minutes: Optional[float] = described(
        None, "stop after this much training time (compiling, validating and saving not counted)"
    )
    patience: Optional[int] = described(
        None, "stop after this many validations in a row that found no lower loss"
    )
    learning_rate: float = described(1e-3, "highest learning rate")
    min_learning_rate: float = described(1e-4, "learning rate at the end of the cosine")
    warmup_steps: int = described(20, "steps of linear warm-up")
    decay_steps: Optional[int] = described(None, "step at which the cosine ends (default: the last)")
    weight_decay: float = described(0.1, "decay of matrices and embeddings")
    beta1: float = described(0.9, "Adam's first decay rate")
    beta2: float = described(0.99, "Adam's second decay rate")
    grad_clip: float = described(1.0, "largest gradient norm; 0 does not clip")

    optimizer_state: str = described("fp32", "how AdamW keeps its moments: fp32, bf16 or 8bit")
    arena: bool = described(False, "all weights, and all of AdamW's moments, in one stretch of memory each")
    precision: str = described(
        "auto",
        "fp32, tf32, bf16, fp16, or fp8 (bf16, linear layers in fp8 where faster); auto: bf16 on a GPU that "
        "has it, else fp32",
    )
    execution: str = described(
        "auto",
        "eager, inductor, cudagraphs, reduce-overhead, max-autotune, max-autotune-no-cudagraphs, graph, "
        "inductor-graph; "
        "auto: the fastest that this machine can do",
    )
    deterministic: Optional[bool] = described(
        None, "the same bits in each run, resumed or not (default: True on a CPU, where it costs nothing)"
    )
    seed: int = described(1337, "seed of weights, batches, dropout and samples")

    log_interval: int = described(10, "steps between two looks at the device")
    eval_interval: int = described(100, "steps between validations; 0 for none but the last")
    eval_seconds: Optional[float] = described(
        None,
        "also a validation whenever this much training time has passed without one (default: a twentieth of "
        "minutes if those are given without an eval_interval)",
    )
    eval_batches: int = described(20, "batches a validation")
    checkpoint_interval: int = described(100, "steps between checkpoints; 0 for none but the last")
    checkpoint_seconds: Optional[float] = described(None, "also a checkpoint whenever this time has passed")
    sample_interval: int = described(100, "steps between samples of text; 0 for none")
    sample_tokens: int = described(120, "tokens a sample")
    tensorboard: bool = described(False, "write TensorBoard event files too")
    wandb: Optional[str] = described(None, "project to log to on Weights & Biases too")

    def __post_init__(self) -> None:
        ones = ("batch_size", "accumulation", "steps", "log_interval", "eval_batches", "sample_tokens")
        zeros = ("warmup_steps", "eval_interval", "checkpoint_interval", "sample_interval")
        check_bounds(
            self,
            least={**dict.fromkeys(ones, 1), **dict.fromkeys(zeros, 0)},
            positive=("minutes", "patience", "eval_seconds", "checkpoint_seconds", "learning_rate"),
            shares=("beta1", "beta2"),
            not_negative=("min_learning_rate", "weight_decay", "grad_clip"),
        )
        check_seed(self.seed)
        check_optimizer_state(self.optimizer_state, self.precision)
        if not 0 < self.validation_fraction < 1:
            raise InputError(
                f"validation_fraction is {self.validation_fraction}; it is a share of the text, "
                "between 0 and 1."
            )
        if self.patience is not None and not self.eval_interval and self.eval_seconds is None:
            raise InputError(
                f"patience {self.patience} counts validations, but with eval_interval 0 there is none before "
                "the last step. Give an eval_interval or eval_seconds, or leave patience out."
            )
        self.model_config(self.vocab_size or 1)

    def model_config(self, vocab_size: int) -> GPTConfig:
        """The model's part, for a vocabulary of that size. Where `auto` is not decided yet, it stands for
        torch's kernels."""
        return GPTConfig(
            block_size=self.block_size,
            vocab_size=vocab_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            embed_dim=self.embed_dim,
            dropout=self.dropout,
            bias=self.bias,
            vocab_multiple=self.vocab_multiple,
            attention=self.attention,
            norm="torch" if self.norm == "auto" else self.norm,
            activation=self.activation,
            loss="float32" if self.loss == "auto" else self.loss,
        )

    @property
    def kernels(self) -> str:
        """Whose kernels compute the step, in words."""
        return f"norms and MLPs by {self.norm}, cross-entropy {self.loss}, attention {self.attention}"

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.block_size * self.accumulation


CURVE_POINTS = 20  # validations of a run that ends by the clock

# What may differ between a run and its continuation. All else decides the weights, and is the checkpoint's.
FREE_ON_RESUME = frozenset(
    {
        "steps",
        "minutes",
        "patience",
        "arena",
        "execution",
        "deterministic",
        "log_interval",
        "eval_interval",
        "eval_seconds",
        "eval_batches",
        "checkpoint_interval",
        "checkpoint_seconds",
        "sample_interval",
        "sample_tokens",
        "tensorboard",
        "wandb",
    }
)

# nanoGPT's config/train_shakespeare_char.py and config/train_gpt2.py (with train.py's defaults).
PRESETS: dict[str, TrainConfig] = {
    "tiny": TrainConfig(),
    "shakespeare": TrainConfig(
        data="shakespeare",
        tokenizer="char",
        num_layers=6,
        num_heads=6,
        embed_dim=384,
        block_size=256,
        dropout=0.2,
        batch_size=64,
        steps=5000,
        learning_rate=1e-3,
        min_learning_rate=1e-4,
        warmup_steps=100,
        beta2=0.99,
        eval_interval=250,
        eval_batches=200,
        checkpoint_interval=250,
        sample_interval=1000,
        sample_tokens=300,
    ),
    "gpt2": TrainConfig(
        data="openwebtext",
        tokenizer="gpt2",
        validation_fraction=0.0005,
        num_layers=12,
        num_heads=12,
        embed_dim=768,
        block_size=1024,
        vocab_multiple=64,
        batch_size=12,
        accumulation=40,
        steps=600_000,
        learning_rate=6e-4,
        min_learning_rate=6e-5,
        warmup_steps=2000,
        beta2=0.95,
        eval_interval=1000,
        eval_batches=200,
        checkpoint_interval=1000,
        sample_interval=1000,
    ),
}


def preset(name: str, **overrides: Any) -> TrainConfig:
    """The preset of that name, with `overrides` replacing its fields; `InputError` for an unknown name."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return changed(PRESETS[name], overrides)


def spread(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with the `eval_seconds` that spread CURVE_POINTS validations over its minutes: who limits the
    time and does not say when to validate wants to see the loss over that time. Intervals in steps, chosen
    for a run of any length, may give one point, or none."""
    if "minutes" not in given or "eval_interval" in given or "eval_seconds" in given:
        return dict(given)
    return {**given, "eval_seconds": 60 * given["minutes"] / CURVE_POINTS}


def is_spread(config: TrainConfig) -> bool:
    """Whether its validations are those that `spread` chose for its minutes."""
    return config.minutes is not None and config.eval_seconds == 60 * config.minutes / CURVE_POINTS


def as_dict(config: TrainConfig) -> dict[str, Any]:
    """The config as plain values, for files and checkpoints; `TrainConfig(**d)` makes it again."""
    return asdict(config)


def continued(saved: TrainConfig, overrides: Mapping[str, Any]) -> TrainConfig:
    """`saved` resumed with `overrides`; `InputError` for one that would make it another run."""
    instead = "begin a new run from these weights with --init-from"
    return schema.continued(saved, overrides, free=FREE_ON_RESUME, instead=instead)
