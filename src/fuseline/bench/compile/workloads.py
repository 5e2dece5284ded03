"""The five models, each with its batch, its data and its FLOPs, in two sizes.

`full` are the sizes that the comparison is about; `small` are the same architectures shrunk until a step on
two CPU cores takes some milliseconds: enough to see every path run, not to compare backends by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fuseline.bench.compile.images import SyntheticImages
from fuseline.data.batches import BatchLoader
from fuseline.data.token_files import TokenDataset
from fuseline.errors import unknown_name
from fuseline.models.gpt import GPT, preset
from fuseline.models.lstm_lm import LSTMConfig, LSTMLanguageModel
from fuseline.models.resnet import ResNet, ResNetConfig
from fuseline.models.vit import ViT, ViTConfig
from fuseline.timing import flops_per_token

BPE_VOCAB_SIZE = 8192


class Loader(Protocol):
    """Batches without end."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]: ...
    def __next__(self) -> tuple[torch.Tensor, ...]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Text:
    """Batches [B, seqlen] of real tokens; `tokenizer` is "char" or "bpe"."""

    tokenizer: str
    seqlen: int

    @property
    def per(self) -> str:
        return "token"

    def units(self, batch_size: int) -> int:
        return batch_size * self.seqlen


@dataclass(frozen=True)
class Images:
    """Batches [B, 3, image_size, image_size] of random images in one of `num_classes` classes."""

    image_size: int
    num_classes: int

    @property
    def per(self) -> str:
        return "image"

    def units(self, batch_size: int) -> int:
        return batch_size


@dataclass(frozen=True)
class Workload:
    """A model, what it trains on, and its share of a time budget (seconds on an H100, roughly)."""

    name: str
    batch_size: int
    source: Text | Images
    build: Callable[[int], nn.Module]
    """Takes the size of the vocabulary, which models of images do not look at."""
    seconds: float
    channels_last: bool = False
    least_vocab_size: int = 0
    """Rows of the embedding, where that is more than the tokenizer's ids."""

    def vocab_size(self, dataset: TokenDataset | None) -> int:
        """Of the model; 0 for one that sees images."""
        return 0 if dataset is None else max(dataset.vocab_size, self.least_vocab_size)

    def loader(self, dataset: TokenDataset | None, seed: int, device: torch.device) -> Loader:
        """A fresh loader; the same seed gives the same batches."""
        if isinstance(self.source, Images):
            return SyntheticImages(
                batch_size=self.batch_size,
                image_size=self.source.image_size,
                num_classes=self.source.num_classes,
                seed=seed,
                device=device,
            )
        assert dataset is not None, "a workload of text is given its tokens"
        return BatchLoader(
            dataset.train,
            batch_size=self.batch_size,
            block_size=self.source.seqlen,
            seed=seed,
            device=device,
        )

    def flops(self, vocab_size: int) -> dict[str, float]:
        """FLOPs of one iteration, forward and backward, by convention: `mfu` and, for GPTs, `mfu_causal`.

        GPTs by 6N + 12 L C T (and 6N + 6 L C T); the others counted, operation by operation, on tensors
        without data.
        """
        with torch.device("meta"):
            model = self.build(vocab_size)
        if isinstance(model, GPT) and isinstance(self.source, Text):
            sizes = (
                model.num_parameters(),
                model.config.num_layers,
                model.config.embed_dim,
                self.source.seqlen,
            )
            units = self.source.units(self.batch_size)
            return {c: float(units * flops_per_token(*sizes, convention=c)) for c in ("mfu", "mfu_causal")}
        counted = 2  # samples: BatchNorm wants more than one
        with FlopCounterMode(display=False) as counter:
            model(*self._batch_without_data(counted)).backward()
        return {"mfu": counter.get_total_flops() * self.batch_size / counted}

    def _batch_without_data(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.device("meta"):
            if isinstance(self.source, Images):
                images = torch.empty(batch_size, 3, self.source.image_size, self.source.image_size)
                return images, torch.zeros(batch_size, dtype=torch.int64)
            tokens_BT = torch.zeros(batch_size, self.source.seqlen, dtype=torch.int64)
            return tokens_BT, tokens_BT


def _gpt(name: str, **overrides: int) -> Callable[[int], nn.Module]:
    # No dropout and no bias, as nanoGPT's own benchmark: backends then compute the same numbers.
    return lambda vocab_size: GPT(preset(name, dropout=0.0, bias=False, vocab_size=vocab_size, **overrides))


_FULL = (
    Workload("shakespeare", 64, Text("char", 256), _gpt("shakespeare"), seconds=60),
    Workload(
        "gpt2",
        16,
        Text("bpe", 1024),
        _gpt("gpt2"),
        seconds=240,
        least_vocab_size=50304,  # GPT-2's own, as nanoGPT pads it: the head is a third of the work
    ),
    Workload("vit", 64, Images(224, 1000), lambda _: ViT(ViTConfig()), seconds=150),
    Workload(
        "resnet50",
        64,
        Images(224, 1000),
        lambda _: ResNet(ResNetConfig()),
        seconds=150,
        channels_last=True,  # the layout tensor cores convolve in
    ),
    Workload(
        "lstm",
        64,
        Text("bpe", 128),
        lambda vocab: LSTMLanguageModel(LSTMConfig(vocab_size=vocab)),
        seconds=60,
    ),
)

_SMALL_GPT = {"num_layers": 2, "num_heads": 2, "embed_dim": 32, "block_size": 32}

_SMALL = (
    Workload("shakespeare", 4, Text("char", 32), _gpt("shakespeare", **_SMALL_GPT), seconds=1),
    Workload("gpt2", 2, Text("char", 32), _gpt("gpt2", **_SMALL_GPT), seconds=1),
    Workload(
        "vit",
        4,
        Images(32, 10),
        lambda _: ViT(
            ViTConfig(
                image_size=32,
                patch_size=8,
                num_layers=2,
                num_heads=2,
                embed_dim=32,
                mlp_dim=64,
                num_classes=10,
            )
        ),
        seconds=1,
    ),
    Workload(
        "resnet50",
        4,
        Images(64, 10),
        lambda _: ResNet(ResNetConfig(depths=(1, 1, 1, 1), width=8, num_classes=10)),
        seconds=1,
        channels_last=True,
    ),
    Workload(
        "lstm",
        4,
        Text("char", 16),
        lambda vocab: LSTMLanguageModel(LSTMConfig(vocab_size=vocab, embed_dim=32)),
        seconds=1,
    ),
)

PRESETS = {"full": {w.name: w for w in _FULL}, "small": {w.name: w for w in _SMALL}}
MODELS = tuple(PRESETS["full"])


def find_workloads(names: tuple[str, ...], preset_name: str) -> tuple[Workload, ...]:
    """The workloads of those names in the order given, in the sizes of `preset_name` ("full" or "small")."""
    if preset_name not in PRESETS:
        raise unknown_name("preset", preset_name, PRESETS)
    for name in names:
        if name not in MODELS:
            raise unknown_name("model", name, MODELS)
    return tuple(PRESETS[preset_name][name] for name in dict.fromkeys(names))
