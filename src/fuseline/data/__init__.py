"""Corpora, tokenizers and memory-mapped batches."""
