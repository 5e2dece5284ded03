"""A language model with its tokenizer, ready to continue text: what `fuseline generate` runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import Field
from typing_extensions import TypedDict

from fuseline.data.tokenizers import load_tokenizer, parsed_tokenizer
from fuseline.errors import InputError, first_line, unknown_name
from fuseline.files.reading import is_there, read_bytes, read_text, regular_size
from fuseline.files.schema import checked, checked_values, read_object, shown
from fuseline.files.writing import written_whole
from fuseline.generation.footprint import HEAD_IN_INT8, Footprint, check_memory, footprint
from fuseline.models import gpt_config, gpt_hugging_face, llama_config
from fuseline.models.gpt import GPT
from fuseline.models.gpt_checkpoints import nanogpt_config
from fuseline.models.gpt_config import GPTConfig
from fuseline.models.llama import Llama, Rotary, check_positions
from fuseline.models.llama_config import LlamaConfig
from fuseline.models.llama_hugging_face import MODEL_TYPES, read_config
from fuseline.models.pretrained import LanguageModel, load_model
from fuseline.models.weight_files import CONFIG, read_config_file, stop_ids
from fuseline.nn import RMSNorm, branch
from fuseline.quant import (
    LayerReport,
    NothingQuantizedError,
    load_quantized,
    quantize,
    save_quantized,
    saved_about,
)
from fuseline.training import checkpoint

TOKENIZER = "tokenizer.json"
QUANTIZED = "quantized.safetensors"
TIMED = ("fp8",)
"""Formats whose product is torch's, made for many rows: for one of Llama-2-7B's layers an H100 reads 16 bits
sooner, 212 tokens/s by 163."""
BYTES = 256  # ids that text without a tokenizer has


class Vocabulary(Protocol):
    """What a tokenizer must do here."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


class _HuggingFaceTokenizer:
    def __init__(self, path: Path) -> None:
        self._inner = parsed_tokenizer(read_text(path), str(path))

    def encode(self, text: str) -> list[int]:
        try:
            return list(self._inner.encode(text).ids)
        except Exception as error:  # `tokenizers` raises no narrower class
            raise InputError(
                f"The tokenizer cannot encode {shown(text)}: {first_line(error)[:200]}"
            ) from error

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=False))


class _OurTokenizer:
    """A tokenizer of Fuseline's; the model's vocabulary may be larger: what it does not know is no text."""

    def __init__(self, path: Path) -> None:
        self._inner = load_tokenizer(path)

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.decode(i for i in ids if i < self._inner.vocab_size)


class Numbers:
    """For models without a tokenizer: text is its bytes, and tokens are shown as their numbers."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(str, ids))


@dataclass(frozen=True)
class Wanted:
    """How much will be generated, for the memory to be counted by."""

    batch: int
    prompt: int
    capacity: int
    storage: str = "model"


@dataclass
class TextGenerator:
    """`stop_ids` end a text, as the model's config says; `left` are linear layers that a format was asked for
    and that would be slower in it."""

    name: str
    model: LanguageModel
    vocabulary: Vocabulary
    stop_ids: tuple[int, ...] = ()
    left: tuple[LayerReport, ...] = ()

    @property
    def weight_bytes(self) -> int:
        """Bytes that a step reads of the weights: all but the tables that are looked up by row."""
        held = {t.data_ptr(): t.nbytes for t in (*self.model.parameters(), *self.model.buffers())}
        looked_up = self.model.rotary.buffers() if isinstance(self.model, Llama) else ()
        tables = [*looked_up]
        if isinstance(self.model, Llama) and not self.model.config.tied:
            tables.append(self.model.embedding.weight)
        elif isinstance(self.model, GPT):
            tables.append(self.model.transformer.wpe.weight)
        return sum(held.values()) - sum(held[t.data_ptr()] for t in tables)


def vocabulary_of(path: Path | None) -> Vocabulary:
    """The tokenizer beside a model's weights; without a model its text is bytes."""
    if path is None:
        return Numbers()
    if not is_there(path):
        raise InputError(f"There is no model at {path}.")
    folder = path if path.is_dir() else path.parent
    file = folder / TOKENIZER
    if not is_there(file):
        raise InputError(
            f"There is no {TOKENIZER} in {folder}: text cannot be encoded. Name one with --tokenizer, or "
            "give --prompt-ids."
        )
    return _OurTokenizer(file) if "format" in read_object(file) else _HuggingFaceTokenizer(file)


def config_of(path: Path | None, preset: str | None) -> GPTConfig | LlamaConfig | None:
    """The shape of a model, before its weights are read; None if only they can tell."""
    if preset is not None:
        if preset in gpt_config.PRESETS:
            return gpt_config.preset(preset, norm="fuseline")
        if preset in llama_config.PRESETS:
            return llama_config.preset(preset)
        raise unknown_name("preset", preset, [*gpt_config.PRESETS, *llama_config.PRESETS])
    assert path is not None
    if not is_there(path):
        raise InputError(f"There is no model at {path}.")
    saved = _saved_quantized(path)
    if saved is not None:
        return saved.config
    own = _checkpoint(path)
    if own is not None:
        shape = checkpoint.peek_shape(own)
        return nanogpt_config(own) if shape is None else shape
    folder = path if path.is_dir() else path.parent
    if not is_there(folder / CONFIG):
        return None
    kind = read_config_file(folder / CONFIG).get("model_type", "gpt2")
    if kind in MODEL_TYPES:
        return read_config(folder)
    return gpt_hugging_face.read_config(folder) if kind == "gpt2" else None


def _checkpoint(path: Path) -> Path | None:
    """The file that a training run wrote its weights to, the best ones if it has such; None for others."""
    files = (path / checkpoint.BEST, path / checkpoint.LATEST) if path.is_dir() else (path,)
    return next((file for file in files if file.suffix == ".pt" and is_there(file)), None)


def memory(
    path: Path | None,
    preset: str | None,
    *,
    dtype: torch.dtype,
    wanted: Wanted,
    format: str | None = None,
    group_size: int = 128,
) -> Footprint | None:
    """What a model takes with its linear layers in `format`, or in that of the file if it is quantized; None
    if only its weights can tell."""
    config = config_of(path, preset)
    saved = None if path is None else _saved_quantized(path)
    if config is None:
        return None
    return footprint(
        config,
        batch=wanted.batch,
        prompt=wanted.prompt,
        capacity=wanted.capacity,
        dtype=dtype,
        format=format if saved is None else saved.format,
        group_size=group_size if saved is None else saved.group_size,
        storage=wanted.storage,
        ready=saved is not None,
    )


def load(
    path: Path | None,
    preset: str | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    wanted: Wanted,
    quant: str | None = None,
    group_size: int = 128,
    method: str | None = None,
    vocabulary: Vocabulary | None = None,
    seed: int = 1337,
    timed: bool = False,
    draft: Footprint | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> TextGenerator:
    """The model at `path`, or of `preset` with random weights, its linear layers in the format `quant`.

    A folder that `save` wrote holds its layers quantized, and they are read as they are. `timed`: layers that
    would be slower in fp8 for the rows of a step (`wanted.batch`) stay as they are, and so does the memory
    that they take. `method` is how weights are rounded (`fuseline.quantize`). `draft` is what a model to be
    loaded beside it will take. Raises `InputError` for what cannot be read, and if the memory will not
    suffice, before it is taken.
    """
    config = config_of(path, preset)
    rows = wanted.batch if timed and quant in TIMED and device.type == "cuda" else None
    saved = None if path is None else _saved_quantized(path)
    if saved is not None and quant is not None:
        raise InputError(f"{path} is quantized already, to {saved.format}: leave --quant out.")
    format = quant if rows is None else None
    takes = memory(path, preset, dtype=dtype, wanted=wanted, format=format, group_size=group_size)
    if takes is not None:
        check_memory(takes, device, draft)
    progress("loading")
    model: LanguageModel
    stop_ids: tuple[int, ...] = ()
    if path is None:
        assert config is not None
        torch.manual_seed(seed)
        model = _random(config, device, dtype)
    elif saved is not None:
        model, stop_ids = _filled(saved, device, dtype), saved.stop_ids
    else:
        model, stop_ids = _read(path, device, dtype)
    left: tuple[LayerReport, ...] = ()
    if quant is not None:
        progress(f"quantizing to {quant}")
        left = _quantize(model, quant, group_size, rows, method)
        if left:
            progress(f"{len(left)} layers stay as they are: the first for {left[0].reason}")
    name = preset or (str(path.name) if path else "")
    return TextGenerator(name, model.eval(), vocabulary or vocabulary_of(path), stop_ids, left)


def _quantize(
    model: LanguageModel, format: str, group_size: int, rows: int | None = None, method: str | None = None
) -> tuple[LayerReport, ...]:
    """All linear layers but those that would be slower in the format for so many rows, which it answers. The
    head, where it has a weight of its own, to int8 beside the formats of `HEAD_IN_INT8`: tokens are chosen
    by it, and 8 bits cost it next to nothing."""
    options: dict[str, Any] = {"group_size": group_size} if format == "int4" else {}
    head = "lm_head" if isinstance(model, GPT) else "head"
    norms: dict[int, RMSNorm] = {}

    def in_a_block(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """As blocks run a layer: with a norm or a sum around it, which our kernels do on the way."""
        width = x.shape[-1]
        if width not in norms:
            norms[width] = RMSNorm(width, device=x.device, dtype=x.dtype)
        return branch(layer, x, norm=norms[width])

    done = quantize(model, format, method=method, skip=(head,), max_rows=rows, call=in_a_block, **options)
    if format in HEAD_IN_INT8:
        with contextlib.suppress(NothingQuantizedError):  # it shares its weight with the embedding
            quantize(model, "int8", method=method)
    return tuple(layer for layer in done.left if layer.name != head)


class _AboutSaid(TypedDict):
    """What `save` says of a model beside its weights."""

    model: Literal["gpt", "llama"]
    config: dict[str, Any]
    stop_ids: list[Annotated[int, Field(ge=0, le=2**31)]]


@dataclass(frozen=True)
class _SavedQuantized:
    """A file of `save`, by its header alone; `format` is that of most of its layers."""

    file: Path
    config: GPTConfig | LlamaConfig
    format: str
    group_size: int
    stop_ids: tuple[int, ...]


def save(generator: TextGenerator, folder: Path, tokenizer: Path | None) -> Path:
    """Write a generator whose model is quantized to `folder`, with the file of its tokenizer if it has one;
    `load` reads it without the weights it was made from. Returns the file of the weights."""
    model = generator.model
    config = asdict(model.config)
    kind = "llama" if isinstance(model, Llama) else "gpt"
    file = folder / QUANTIZED
    save_quantized(model, file, about={"model": kind, "config": config, "stop_ids": list(generator.stop_ids)})
    if tokenizer is not None and tokenizer.resolve() != (folder / TOKENIZER).resolve():
        with written_whole(folder / TOKENIZER) as partial:
            partial.write_bytes(read_bytes(tokenizer))
    return file


def _saved_quantized(path: Path) -> _SavedQuantized | None:
    file = path / QUANTIZED if path.is_dir() else path
    about = saved_about(file) if file.suffix == ".safetensors" and file.is_file() else None
    if about is None or "model" not in about:
        return None
    place = f"{file}: its description of the model"
    said = checked_values(_AboutSaid, about, place)
    kind: type[GPTConfig | LlamaConfig] = LlamaConfig if said["model"] == "llama" else GPTConfig
    config = checked(kind, said["config"], place, extra="forbid")
    if config.num_weights > 2 * regular_size(file):  # int4 has two to a byte
        raise InputError(f"{place} is of {config.num_weights:,} weights, and the file does not hold so many.")
    layers = [(layer["format"], layer["group_size"]) for layer in about["layers"].values()]
    if not layers:
        raise InputError(f"{place} names no quantized layer.")
    format, group_size = max(set(layers), key=layers.count)
    return _SavedQuantized(file, config, format, group_size or 128, tuple(said["stop_ids"]))


def _filled(saved: _SavedQuantized, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """The model of a saved file, in whose memory its tensors are read."""
    model: LanguageModel
    if isinstance(saved.config, LlamaConfig):
        check_positions(saved.config, saved.file)
    with torch.device("meta"):
        model = Llama(saved.config) if isinstance(saved.config, LlamaConfig) else GPT(saved.config)
    load_quantized(model.to(dtype), saved.file, device=device)
    if isinstance(model, Llama):
        model.rotary = Rotary(model.config).to(device)
    return model


def _random(config: GPTConfig | LlamaConfig, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """Weights drawn where they will stand, in their dtype: a model of billions is not drawn twice."""
    if isinstance(config, GPTConfig):
        return GPT(config).to(device=device, dtype=dtype)
    with torch.device("meta"):
        model = Llama(config)
    model.allot(device, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(1.0)
    return model


def _read(path: Path, device: torch.device, dtype: torch.dtype) -> tuple[LanguageModel, tuple[int, ...]]:
    own = _checkpoint(path)
    if own is not None and checkpoint.is_ours(own):
        return checkpoint.load_weights(own, norm="fuseline", dropout=0.0).to(device=device, dtype=dtype), ()
    model = load_model(path, dtype=dtype, device=device)
    folder = path if path.is_dir() else path.parent
    return model, stop_ids(folder)
