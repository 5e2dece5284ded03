"""The perplexity of a trained GPT on text that was held out, format by format.

The model is one of `fuseline train gpt`, and the text its run's own validation part, or a file: nothing of it
was trained on. Calibration reads training text. All formats see the same crops.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from fuseline.bench.failure import describe_failure
from fuseline.data.batches import validation_batches
from fuseline.data.corpora import load_corpus
from fuseline.data.token_files import prepare
from fuseline.data.tokenizers import Tokenizer
from fuseline.errors import InputError, unknown_name
from fuseline.generation.static_cache import Rounded
from fuseline.models.gpt import GPT
from fuseline.models.heads import Attend
from fuseline.ops.quant_codes import CODES
from fuseline.quant import LayerReport, methods_of, quantize
from fuseline.records import Record, append, describe
from fuseline.records.record import Scalar
from fuseline.training.checkpoint import BEST, LATEST, load_weights, peek

SUITE = "quality"

Observer = Callable[[str, int, int], None]
"""Called with what is measured now, formats done, and formats in all."""


@dataclass(frozen=True)
class Kind:
    """A format of the linear layers: how it is called, and how its weights are rounded. Or one of the cache
    of keys and values (`cached`), the layers as they are."""

    format: str
    group_size: int = 0
    method: str = "nearest"
    zero_points: bool = False
    cached: str = ""

    @property
    def rounding(self) -> str:
        """As records say it."""
        return "calibrated" if self.method == "gptq" else self.method


ENDINGS = {"": "nearest", "-fitted": "fitted", "-hqq": "hqq", "-calibrated": "gptq"}
FORMATS = {
    **{f"int8{ending}": Kind("int8", method=method) for ending, method in ENDINGS.items()},
    **{
        f"int4{'' if size == 128 else f'-{size}'}{'-zeros' if zeros else ''}{ending}": Kind(
            "int4", size, method, zeros
        )
        for zeros in (False, True)
        for size in (128, 64, 32)
        for ending, method in ENDINGS.items()
    },
    "fp8": Kind("fp8"),
    **{
        f"{name}{ending}": Kind(name, CODES[name].group_size if name in CODES else 0, method)
        for name in (*CODES, "w8a8", "sparse24")
        for ending, method in ENDINGS.items()
        if method in methods_of(name)
    },
    "cache-int8": Kind("int8 cache", cached="int8"),
    "cache-fp8": Kind("fp8 cache", cached="fp8"),
}
"""int8, int4, int4-64, int4-32-zeros (with zero points), nf4, .., each with an ending that says how weights
are rounded."""
USUAL = (
    "int8",
    "int8-calibrated",
    *(f"int4{size}{ending}" for size in ("", "-64", "-32") for ending in ENDINGS),
    "fp8",
    *(f"{name}{ending}" for name in CODES for ending in ("", "-calibrated") if f"{name}{ending}" in FORMATS),
    "w8a8",
    "sparse24",
    "cache-int8",
    "cache-fp8",
)


@dataclass(frozen=True)
class QualityBench:
    """`run` is the folder of a training run. Perplexity is over `batches` batches of the run's shape, and
    calibration over `calibration` of them; it is of `text`, a UTF-8 file, if that is named. On a GPU the
    model is in bf16, on a CPU in fp32."""

    device: torch.device
    run: Path
    formats: tuple[str, ...] = USUAL
    batches: int = 40
    calibration: int = 8
    batch_size: int | None = None
    text: Path | None = None

    def __post_init__(self) -> None:
        for name in self.formats:
            if name not in FORMATS:
                raise unknown_name("format", name, FORMATS)
        if self.batches < 1 or self.calibration < 1:
            raise InputError(
                f"batches is {self.batches} and calibration {self.calibration}; each is 1 or more."
            )
        if not (self.run / LATEST).exists():
            raise InputError(f"{self.run} is not the folder of a run of `fuseline train gpt`: no {LATEST}.")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


@dataclass(frozen=True)
class Texts:
    """What a run's model was trained on, and what it is measured on, in batches of one shape. `num_bytes` is
    of all text of the corpus, what was held out as well; None if unknown."""

    vocab_size: int
    num_bytes: int | None
    trained_on: np.ndarray
    held_out: np.ndarray
    batch_size: int
    block_size: int
    device: torch.device

    def crops(self, tokens: np.ndarray, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return validation_batches(
            tokens, batch_size=self.batch_size, block_size=self.block_size, count=count, device=self.device
        )


def texts(bench: QualityBench, cache_dir: Path | None = None) -> Texts:
    """Those of `bench.run`. Raises `InputError` where they cannot be read any more."""
    config, _ = peek(bench.run / LATEST)
    corpus = load_corpus(config.data, cache_dir)
    dataset = prepare(
        corpus,
        config.tokenizer,
        vocab_size=config.vocab_size,
        validation_fraction=config.validation_fraction,
        cache_dir=cache_dir,
    )
    held_out = dataset.validation if bench.text is None else _tokens(bench.text, dataset.tokenizer)
    return Texts(
        dataset.vocab_size,
        corpus.num_bytes,
        dataset.train,
        held_out,
        bench.batch_size or config.batch_size,
        config.block_size,
        bench.device,
    )


def run(bench: QualityBench, out: Path, observe: Observer, *, cache_dir: Path | None = None) -> list[Record]:
    """Measure; records are appended to `<out>/quality.jsonl` format by format."""
    config, step = peek(bench.run / LATEST)
    read = texts(bench, cache_dir)
    case: dict[str, Scalar] = {
        "section": "formats",
        "run": bench.run.name,
        "data": Path(config.data).name,
        "text": "held out" if bench.text is None else bench.text.name,
        "step": step,
        "tokens": bench.batches * read.batch_size * read.block_size,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "embed_dim": config.embed_dim,
        "context": config.block_size,
        "vocab_size": read.vocab_size,
        "trained_tokens": step * config.tokens_per_step,
        "text_mb": None if read.num_bytes is None else round(read.num_bytes / 1e6, 1),
        "held_out_share": config.validation_fraction,
    }
    records: list[Record] = []
    plain = str(bench.dtype).removeprefix("torch.")
    names = (plain, *bench.formats)
    base = math.nan
    whole = _model(bench, read.vocab_size)
    for number, name in enumerate(names):
        observe(name, number, len(names))
        kind = FORMATS.get(name, Kind(name))
        of: dict[str, Scalar] = {
            **case,
            "format": kind.format,
            "group_size": kind.group_size or None,
            "rounding": kind.rounding,
        }
        if kind.zero_points:
            of["zero_points"] = True
        try:
            found, bits = _measured(kind, whole, read, bench, quantized=name != plain and not kind.cached)
        except (InputError, RuntimeError, NotImplementedError) as error:
            of["reason"] = str(error) if isinstance(error, InputError) else describe_failure(error)
            new = [Record.of(SUITE, of, "skipped", None, describe(bench.device))]
        else:
            base = found if name == plain else base
            environment = describe(bench.device)
            new = [Record.of(SUITE, of, "perplexity", found, environment, n=bench.batches)]
            if not kind.cached:
                new.append(Record.of(SUITE, of, "bits_per_weight", bits, environment))
            if name != plain:
                new.append(Record.of(SUITE, of, "loss_error", found / base - 1, environment))
        append(out / f"{SUITE}.jsonl", new)
        records += new
    observe("done", len(names), len(names))
    return records


def _measured(
    kind: Kind, whole: GPT, read: Texts, bench: QualityBench, *, quantized: bool
) -> tuple[float, float]:
    """The perplexity of a copy of `whole`, the only one on the device, and gone afterwards; and the bits that
    each weight of its linear layers takes, scales among them."""
    model = copy.deepcopy(whole).to(bench.device)
    bits = 8.0 * bench.dtype.itemsize
    if quantized:
        batches = [batch[:1] for batch in read.crops(read.trained_on, bench.calibration)]
        done = quantize(
            model,
            kind.format,
            calibrate=batches if kind.method == "gptq" else None,
            group_size=kind.group_size or 128,
            zero_points=kind.zero_points,
            method=kind.method,
        )
        if not done.quantized:
            reasons = [layer.reason or "" for layer in done.left]
            raise InputError(f"No layer can be in {kind.format}: {max(set(reasons), key=reasons.count)}.")
        bits = bits_per_weight(done.quantized)
    attend = Rounded(kind.cached) if kind.cached else None
    return perplexity(model, read.crops(read.held_out, bench.batches), attend), bits


def bits_per_weight(layers: Sequence[LayerReport]) -> float:
    """Bits that a weight of these layers takes where it is saved, with its share of scales, zero points and
    padding."""
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    return 8 * sum(layer.bytes_after for layer in layers) / weights


def _tokens(text: Path, tokenizer: Tokenizer) -> np.ndarray:
    try:
        return np.asarray(tokenizer.encode(text.read_text(encoding="utf-8")), np.int64)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"Cannot read text from {text}: {error}") from error


def _model(bench: QualityBench, vocab_size: int) -> GPT:
    """On the CPU, in the dtype that is measured."""
    best = bench.run / BEST
    model = load_weights(best if best.exists() else bench.run / LATEST, norm="fuseline", dropout=0.0)
    if model.config.vocab_size != vocab_size:
        raise InputError(
            f"{bench.run} knows {model.config.vocab_size} tokens, and its data now has {vocab_size}: the "
            "text or the tokenizer is not that of the run."
        )
    return model.to(bench.dtype).eval()


@torch.no_grad()
def perplexity(
    model: GPT, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], attend: Attend | None = None
) -> float:
    """e to the mean loss in nats a token, over batches of one size; `attend` in the place of the model's own
    attention."""

    def loss(tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        if attend is None:
            return model(tokens_BT, targets_BT)
        logits_BTV = model.logits(model.hidden(tokens_BT, None, attend))
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())

    losses = [loss(*batch).double() for batch in batches]
    return math.exp(float(torch.stack(losses).mean()))
