"""Folders of transformers as a model and a batch: the class that a folder names, and what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fuseline.errors import InputError
from fuseline.profiling.hugging_face import load_folder

transformers = pytest.importorskip("transformers", reason="needs transformers to write its folders")

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WORDS = {**SMALL, "vocab_size": 50, "max_position_embeddings": 32}
IMAGES = {**SMALL, "image_size": 16, "patch_size": 8, "num_labels": 3}


def _load(model: str, config: str, options: dict[str, Any], folder: Path) -> Any:
    made = getattr(transformers, model)(getattr(transformers, config)(**options))
    made.save_pretrained(folder)
    return load_folder(folder, batch_size=2, seqlen=8, dtype=torch.float32, train=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model, config, options, shapes",
    [
        ("BertForMaskedLM", "BertConfig", WORDS, {"input_ids": (2, 8), "labels": (2, 8)}),
        ("BertForSequenceClassification", "BertConfig", WORDS, {"input_ids": (2, 8), "labels": (2,)}),
        ("ViTForImageClassification", "ViTConfig", IMAGES, {"pixel_values": (2, 3, 16, 16), "labels": (2,)}),
    ],
)
def test_the_batch_is_what_the_model_takes(
    model: str, config: str, options: dict[str, Any], shapes: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    work = _load(model, config, options, tmp_path)
    assert type(work.model).__name__ == model
    batch = work.batch(work.tensors)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == shapes
    work.loss(work.model, work.tensors).backward()


def test_a_model_of_sounds_is_refused(tmp_path: Path) -> None:
    options = {**SMALL, "vocab_size": 20, "conv_dim": (8,), "conv_kernel": (3,), "conv_stride": (2,)}
    options |= {
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "num_feat_extract_layers": 1,
    }
    with pytest.raises(InputError, match="takes input_values, but"):
        _load("Wav2Vec2ForCTC", "Wav2Vec2Config", options, tmp_path)
