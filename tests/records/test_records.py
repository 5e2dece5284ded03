"""Records survive the disk unchanged, and what is not a record is refused by file and line."""

from __future__ import annotations

import gzip
import json
import lzma
import math
from dataclasses import replace

import pytest

from fuseline.errors import InputError
from fuseline.records import Environment, Record, append, describe, read, read_same, results_path

ENVIRONMENT = Environment("Test GPU", "1980/2619 MHz", 350.0, "2.11.0", "13.0", "0.1.0", "abc")


def record(**changes: object) -> Record:
    arguments = {"suite": "ops", "case": {"op": "softmax", "n": 128}, "metric": "time_us", "value": 1.5}
    return Record.of(**{**arguments, **changes}, environment=ENVIRONMENT)


def test_records_come_back_as_they_went(tmp_path):
    path = tmp_path / "new" / "folder" / "ops.jsonl"
    first, second = record(low=1.4, high=1.6, n=50), record(metric="skipped", value=None, peer="quack")
    append(path, [first])
    append(path, [second])
    assert read(path) == [first, second]


def test_a_line_is_plain_json_with_every_field(tmp_path):
    line = json.loads(record().to_json())
    assert line["device"] == "Test GPU"
    assert line["unit"] == "us"
    assert line["peer_version"] == "0.1.0"
    assert line["case"] == {"op": "softmax", "n": 128}


def test_a_value_that_is_not_finite_is_kept_as_null():
    assert record(value=math.nan).value is None
    assert "NaN" not in record(value=math.inf).to_json()


def test_unknown_names_are_refused_with_a_hint():
    with pytest.raises(InputError, match="'time_us'"):
        record(metric="time_u")
    with pytest.raises(InputError, match="ladder"):
        record(suite="laddr")


def test_a_nested_case_is_refused():
    with pytest.raises(InputError, match="flat"):
        record(case={"shape": [1, 2]})


@pytest.mark.parametrize("line", ["not json", "[1, 2]", '{"suite": "ops"}'])
def test_a_foreign_line_is_named_by_file_and_line(tmp_path, line):
    path = tmp_path / "ops.jsonl"
    path.write_text(record().to_json() + "\n" + line + "\n")
    with pytest.raises(InputError, match=r"ops\.jsonl:2"):
        read(path)


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        read(tmp_path / "nowhere.jsonl")


def test_what_a_run_goes_on_from_is_of_the_same_device_torch_and_commit(tmp_path):
    path = tmp_path / "ops.jsonl"
    assert read_same(path, ENVIRONMENT) == []
    others = [replace(record(), **{name: "another"}) for name in ("device", "torch", "commit")]
    later = replace(record(), clocks="1755/2619 MHz")
    append(path, [*others, record(value=2.5), later])
    assert [(one.value, one.clocks) for one in read_same(path, ENVIRONMENT)] == [
        (2.5, ENVIRONMENT.clocks),
        (1.5, later.clocks),
    ]


def test_the_environment_of_a_cpu(monkeypatch):
    monkeypatch.setenv("FUSELINE_COMMIT", "0123456789ab")
    environment = describe("cpu")
    assert environment.commit == "0123456789ab"
    assert environment.cuda is None
    assert "threads" in environment.device


def test_results_paths_are_fit_for_files(tmp_path):
    assert results_path(tmp_path, "ops", "NVIDIA H100 80GB HBM3").name == "ops-nvidia-h100-80gb-hbm3.jsonl"


@pytest.mark.parametrize("module, suffix", [(lzma, ".xz"), (gzip, ".gz")])
def test_compressed_files_are_read(tmp_path, module, suffix):
    plain, packed = tmp_path / "ops.jsonl", tmp_path / f"ops.jsonl{suffix}"
    append(plain, [record(value=1.0), record(value=2.0)])
    packed.write_bytes(module.compress(plain.read_bytes()))
    assert read(packed) == read(plain)
    packed.write_bytes(module.compress(plain.read_bytes())[:-20])
    with pytest.raises(InputError, match="damaged"):
        read(packed)
