"""`fuseline bench quality`: what the formats of quantized weights cost a trained model."""

from fuseline.bench.quality.suite import FORMATS, QualityBench, run

__all__ = ["FORMATS", "QualityBench", "run"]
