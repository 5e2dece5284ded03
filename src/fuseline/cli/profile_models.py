"""The models of `fuseline profile` that are neither a GPT nor a Llama: translation models by their presets or
a run's folder, and the image and text models that `fuseline bench compile` trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fuseline.bench.compile.workloads import Images, find_workloads
from fuseline.cli.profile_asked import Asked
from fuseline.errors import InputError
from fuseline.models.translation_config import TranslationConfig
from fuseline.profiling.user_code import Work
from fuseline.records.record import Scalar
from fuseline.training import translation_config
from fuseline.training.checkpoint import BEST, LATEST, is_ours, read_weights, settings_of
from fuseline.training.translation_train import build_model, load_translation_model

TRANSLATION = "translation-"
OTHERS = ("vit", "resnet50", "lstm")
NAMES = (*(f"{TRANSLATION}{name}" for name in translation_config.PRESETS), *OTHERS)
USUAL_BATCH = 32  # sentences, for a translation model whose run does not say how many it takes
LSTM_VOCABULARY = 8192


@dataclass(frozen=True)
class OtherModel:
    """`case` describes the model by the names that records use; `make` builds the model and a random batch
    for it, the targets last."""

    case: dict[str, Scalar]
    make: Callable[[], Work]


def find(asked: Asked) -> OtherModel | None:
    """The model of that name, or of that run of `fuseline train translate`; None for others. Raises
    `InputError` for options that do not fit the model."""
    path = Path(asked.target)
    if asked.target in OTHERS:
        found = _trained_by_bench(asked)
    elif asked.target in NAMES:
        found = _preset_translation(asked)
    elif (file := _translation_file(path)) is not None:
        found = _saved_translation(asked, file)
    else:
        return None
    if asked.task == "decode":
        raise InputError("--decode profiles only GPTs and Llamas. Name a preset or a checkpoint of one.")
    return found


def _translation_file(path: Path) -> Path | None:
    files = (path / BEST, path / LATEST) if path.is_dir() else (path,)
    return next(
        (file for file in files if file.suffix == ".pt" and file.is_file() and is_ours(file, "translate")),
        None,
    )


def _preset_translation(asked: Asked) -> OtherModel:
    preset = translation_config.preset(asked.target.removeprefix(TRANSLATION))
    config = _changed(preset.model_config(preset.vocab_size), asked)
    batch = max(1, preset.max_tokens // config.length)
    return _translation(asked, {"preset": asked.target}, config, batch, lambda: build_model(config))


def _saved_translation(asked: Asked, file: Path) -> OtherModel:
    config = settings_of(TranslationConfig, read_weights(file, "translate")[0], file)
    config = _changed(config, asked)
    options = {name: getattr(config, name) for name in ("fused", "unfused", "dropout")}
    case: dict[str, Scalar] = {"checkpoint": asked.target}
    return _translation(asked, case, config, USUAL_BATCH, lambda: load_translation_model(file, **options))


def _changed(config: TranslationConfig, asked: Asked) -> TranslationConfig:
    dropout = config.dropout if asked.dropout is None else asked.dropout
    return replace(config, fused=asked.kernels == "fuseline", unfused="torch", dropout=dropout)


def _translation(
    asked: Asked,
    named: dict[str, Scalar],
    config: TranslationConfig,
    usual: int,
    build: Callable[[], torch.nn.Module],
) -> OtherModel:
    batch, length = asked.batch or usual, asked.seqlen or config.length
    if length > config.length:
        raise InputError(f"--seqlen {length}: this model's sequences have {config.length} tokens at most.")

    def make() -> Work:
        shape = (batch, length)
        first = [_ids(asked, config.vocab_size, shape)] if config.architecture == "encoder-decoder" else []
        return Work(build(), (*first, *_pair(asked, config.vocab_size, shape)))

    case: dict[str, Scalar] = {"model": "translation", **named, "batch": batch, "seqlen_q": length}
    return OtherModel({**case, "kernels": asked.kernels, "dropout": config.dropout}, make)


def _trained_by_bench(asked: Asked) -> OtherModel:
    (workload,) = find_workloads((asked.target,), "full")
    batch, source = asked.batch or workload.batch_size, workload.source
    case: dict[str, Scalar] = {"model": asked.target, "batch": batch}
    if isinstance(source, Images):
        if asked.seqlen is not None:
            raise InputError(f"--seqlen {asked.seqlen}: {asked.target} takes images. Leave --seqlen out.")
        size, classes = source.image_size, source.num_classes

        def images() -> Work:
            generator = torch.Generator().manual_seed(asked.seed)
            pictures = torch.randn(batch, 3, size, size, generator=generator)
            model, layout = workload.build(0), torch.channels_last
            if workload.channels_last:
                model = model.to(memory_format=layout)  # type: ignore[call-overload]
                pictures = pictures.to(memory_format=layout)
            return Work(model, (pictures, _ids(asked, classes, (batch,))))

        return OtherModel(case, images)
    length = asked.seqlen or source.seqlen

    def text() -> Work:
        shape = (batch, length)
        return Work(workload.build(LSTM_VOCABULARY), _pair(asked, LSTM_VOCABULARY, shape))

    return OtherModel({**case, "seqlen_q": length}, text)


def _ids(asked: Asked, below: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(asked.seed))


def _pair(asked: Asked, below: int, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and for each the token that follows it."""
    tokens = _ids(asked, below, (shape[0], shape[1] + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
