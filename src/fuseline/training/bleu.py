"""BLEU as sacreBLEU counts it (Post, 2018): cased, on plain text, tokenized by "13a"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuseline.errors import InputError


@dataclass(frozen=True)
class Bleu:
    """`score` from 0 to 100; `signature` says how it was counted and by which version."""

    score: float
    signature: str


def corpus_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Bleu:
    """BLEU of `hypotheses` against one reference each. `InputError` if `sacrebleu` is not installed."""
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise InputError(
            "BLEU needs the package `sacrebleu`: pip install sacrebleu, or train with --bleu False."
        ) from error
    metric = BLEU()
    score = metric.corpus_score(list(hypotheses), [list(references)]).score
    return Bleu(float(score), str(metric.get_signature()))
