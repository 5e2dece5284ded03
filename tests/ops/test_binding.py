"""The public names are functions, whatever was imported before and however often they are looked up."""

from __future__ import annotations

import subprocess
import sys

from fuseline import ops


def test_functions_stay_functions() -> None:
    code = """
import importlib
import fuseline.ops.attention.backends, fuseline.ops.softmax, fuseline.ops.layer_norm
import fuseline.ops
for name in 2 * ("softmax", "layer_norm", "attention"):
    importlib.import_module(f"fuseline.ops.{name}")
    assert callable(getattr(fuseline.ops, name)), name
    scope = {}
    exec(f"from fuseline.ops import {name}", scope)
    assert callable(scope[name]), name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_op_is_public() -> None:
    for op in ops.registered():
        assert getattr(ops, op.name) is op.function
