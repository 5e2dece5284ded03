"""A trained translation model with its tokenizer, ready to translate text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fuseline.acceleration.precision import check_precision
from fuseline.data.pair_tokens import PairTokenizer
from fuseline.errors import InputError
from fuseline.generation.writers import TranslationModel
from fuseline.training.checkpoint import BEST, LATEST
from fuseline.training.resume import TOKENIZER
from fuseline.training.translation_run import translated_ids
from fuseline.training.translation_train import load_translation_model


@dataclass(frozen=True)
class Translator:
    """`translate(["Ein Satz."])` gives `["A sentence."]`."""

    model: TranslationModel
    tokenizer: PairTokenizer
    precision: str = "fp32"

    @classmethod
    def load(cls, path: Path, *, device: str = "cpu", precision: str = "fp32") -> Translator:
        """The model of a run's folder (its best weights), or of its `best.pt` or `latest.pt`.

        Raises `InputError` if there is none, or its tokenizer is missing.
        """
        check_precision(precision, torch.device(device), train=False)
        if path.is_dir():
            found = next((path / name for name in (BEST, LATEST) if (path / name).is_file()), None)
            if found is None:
                raise InputError(f"{path} holds no {BEST}. Train a model with `fuseline train translate`.")
            path = found
        model = load_translation_model(path).to(device).eval()
        return cls(model, PairTokenizer.load(path.parent / TOKENIZER), precision)

    def translate(
        self, sentences: Sequence[str], *, beams: int = 5, length_penalty: float = 1.0
    ) -> list[str]:
        """A translation of each sentence; of an empty one, an empty text."""
        told = [i for i, sentence in enumerate(sentences) if sentence.strip()]
        if not told:
            return ["" for _ in sentences]
        source = self.tokenizer.encode_batch([sentences[i].strip() for i in told])
        found = translated_ids(self.model, source, self.precision, beams, length_penalty)
        texts = dict(zip(told, map(self.tokenizer.decode, found), strict=True))
        return [texts.get(i, "") for i in range(len(sentences))]
