"""Fuseline: make a PyTorch transformer fast, and prove it."""

from fuseline.errors import InputError
from fuseline.version import __version__

__all__ = ["InputError", "__version__"]
