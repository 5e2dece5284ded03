"""The public names are functions, whatever was imported before and however often they are looked up."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fuseline import ops


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "attention"])
def test_a_function_stays_a_function(name: str) -> None:
    code = (
        f"import fuseline.ops.attention.backends, fuseline.ops.softmax, fuseline.ops.layer_norm\n"
        f"import fuseline.ops, importlib\n"
        f"for _ in range(2):\n"
        f"    importlib.import_module('fuseline.ops.{name}')\n"
        f"    assert callable(fuseline.ops.{name}), fuseline.ops.{name}\n"
        f"    from fuseline.ops import {name}\n"
        f"    assert callable({name})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_op_is_public() -> None:
    for op in ops.registered():
        assert getattr(ops, op.name) is op.function
