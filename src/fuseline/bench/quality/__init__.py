"""`fuseline bench quality`: what the formats of quantized weights cost a trained model."""

from fuseline.bench.quality.suite import FORMATS, USUAL, QualityBench, perplexity, run, texts

__all__ = ["FORMATS", "USUAL", "QualityBench", "perplexity", "run", "texts"]
