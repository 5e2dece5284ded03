"""`fuseline bench quality`: what the formats of quantized weights cost a trained model."""

from fuseline.bench.quality.suite import FORMATS, QualityBench, perplexity, run, texts

__all__ = ["FORMATS", "QualityBench", "perplexity", "run", "texts"]
