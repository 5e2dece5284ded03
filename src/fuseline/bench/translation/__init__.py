"""The translation suite: what fused kernels are worth to a model that learns to translate, and what they
cost."""

from fuseline.bench.translation.suite import PARTS, TranslationBench, run

__all__ = ["PARTS", "TranslationBench", "run"]
