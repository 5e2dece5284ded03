"""A figure carries hashes of the kernels that may stand behind it, and they change when those change."""

from __future__ import annotations

from pathlib import Path

import pytest

import fuseline.ops  # noqa: F401  (it registers them)
from fuseline.ops.op import registered
from fuseline.records import kernel_sources
from fuseline.records.kernel_sources import families, families_of, family_hash, hashes, sources_hash


@pytest.fixture
def family(tmp_path: Path) -> Path:
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "row.cuh").write_text("int row();\n")
    (tmp_path / "norms").mkdir()
    (tmp_path / "norms" / "norm.cu").write_text('#include "device/row.cuh"\nint norm() { return row(); }\n')
    return tmp_path


def _hash(folder: Path) -> str:
    return sources_hash(sorted((folder / "norms").glob("*.cu")), (folder,))


def test_a_changed_header_changes_the_hash_and_a_comment_does_not(family: Path) -> None:
    before = _hash(family)
    assert len(before) == kernel_sources.HASH_LENGTH
    header = family / "device" / "row.cuh"
    header.write_text("// What a row is.\nint  row(); /* of\n three lines */\n")
    assert _hash(family) == before
    header.write_text("long row();\n")
    assert _hash(family) != before


def test_a_new_source_changes_the_hash(family: Path) -> None:
    before = _hash(family)
    (family / "norms" / "other.cu").write_text("int other();\n")
    assert _hash(family) != before


def test_every_family_has_a_hash_of_its_own() -> None:
    found = [family_hash(family) for family in (*families(), kernel_sources.CPU)]
    assert None not in found
    assert len(set(found)) == len(found) > 5


def test_ours_carry_the_families_of_their_op_and_peers_none() -> None:
    norm = {"op": "add_rms_norm"}
    assert set(hashes("ops", norm, "fuseline", "time_us", on_gpu=True)) == {"norms"}
    assert set(hashes("ops", norm, "fuseline", "time_us", on_gpu=False)) == {"cpu"}
    assert hashes("ops", norm, "quack", "time_us", on_gpu=True) == {}
    assert set(hashes("ops", norm, "quack", "paired_speedup", on_gpu=True)) == {"norms"}
    assert set(hashes("attention", {"section": "long"}, "pick", "time_us", on_gpu=True)) == {"attention"}
    assert "loss" in hashes("step", {"preset": "gpt2"}, "fuseline-eager", "time_us", on_gpu=True)
    assert hashes("compile", {"model": "vit"}, "fuseline", "time_us", on_gpu=True) == {}


def test_a_rung_without_kernels_of_ours_carries_none() -> None:
    rung = {"rung": "flash", "kernels": "torch", "backend": "flash", "loss": "float32"}
    assert hashes("ladder", rung, "fuseline", "time_us", on_gpu=True) == {}
    assert set(hashes("ladder", {**rung, "loss": "fuseline-linear"}, "fuseline", "time_us", on_gpu=True)) == {
        "loss"
    }
    assert set(hashes("ladder", {**rung, "backend": "naive_fused"}, "fuseline", "time_us", on_gpu=True)) == {
        "softmax"
    }
    assert hashes("translation", {"kernels": "formulas"}, "fuseline", "time_us", on_gpu=True) == {}


def test_every_registered_op_has_families_that_there_are() -> None:
    for op in registered():
        found = families_of("ops", {"op": op.name}, "fuseline", "time_us", on_gpu=True)
        assert found, op.name
        assert set(found) <= set(families())
        assert op.name in kernel_sources._OF_OP, f"{op.name}: name its families in kernel_sources"
