"""Versions: what is right, too old, missing or broken, each with what mends it."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest
import torch

from fuseline.doctor import software


def test_torch_is_named_with_its_build():
    check = software.torch_check()
    assert check.state == "ok"
    assert torch.__version__ in check.found


@pytest.mark.parametrize("version, state", [("2.11.0+cu130", "ok"), ("2.10.1", "bad"), ("3.0.0", "ok")])
def test_an_old_torch_is_broken_and_says_what_to_install(monkeypatch, version, state):
    monkeypatch.setattr(torch, "__version__", version)
    check = software.torch_check()
    assert check.state == state
    assert (check.mend == "pip install 'torch>=2.11'") == (state == "bad")


def test_a_torch_that_does_not_import_is_broken(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises ImportError
    check = software.torch_check()
    assert check.state == "bad"
    assert "cannot be imported" in check.found


def test_an_old_python_is_broken(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert next(software.checks()).state == "bad"


@pytest.mark.parametrize(
    "needs, state, mend",
    [
        (["torch", "numpy>=1"], "ok", ""),
        (["torch", "numpy>=999"], "bad", "pip install 'numpy>=999'"),
        (["no-such-package-anywhere>=2"], "bad", "pip install 'no-such-package-anywhere>=2'"),
        (["no-such-package-anywhere; extra == 'x'"], "ok", ""),
    ],
)
def test_required_packages_are_held_against_what_is_installed(monkeypatch, needs, state, mend):
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needs)
    check = {c.name: c for c in software.checks()}["required packages"]
    assert (check.state, check.mend) == (state, mend)


def test_optional_packages_are_absent_not_broken(monkeypatch):
    def version(package):
        if package == "tiktoken":
            return "1.2.3"
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    checks = {c.name: c for c in software.optional()}
    assert checks["tiktoken"].state == "ok"
    assert "1.2.3" in checks["tiktoken"].found
    assert {c.state for name, c in checks.items() if name != "tiktoken"} == {"absent"}
    assert checks["wandb"].mend == "pip install wandb"
