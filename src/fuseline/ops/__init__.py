"""Fused operations, one file an op."""
