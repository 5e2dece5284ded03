"""Per-iteration times: read strictly, thinned without losing spikes, framed without being ruled by them."""

from __future__ import annotations

import json

import pytest

from fuseline import report
from fuseline.errors import InputError
from fuseline.report import traces


def test_they_are_read_by_name_and_later_folders_win(tmp_path):
    for folder, times in (("a", [1, 2.5]), ("b", [3.0])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "gpt2-eager.json").write_text(json.dumps(times))
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "missing"]
    assert traces.load(folders) == {"gpt2-eager": [3.0]}


@pytest.mark.parametrize("text", ["{", "[]", "{}", '["a"]', "[NaN]", "3", "[true, null]"])
def test_a_file_that_is_not_a_trace_is_named(tmp_path, text):
    (tmp_path / "gpt2-eager.json").write_text(text)
    with pytest.raises(InputError, match=r"gpt2-eager\.json"):
        traces.load([tmp_path])


@pytest.mark.parametrize("count", [1, 7, 160, 161, 1000, 12345])
def test_thinning_keeps_the_range_and_the_order(count):
    times = [10.0 + (i * 37 % 11) / 10 for i in range(count)]
    times[count // 2] = 99.0
    points = traces.thinned(times)
    assert len(points) <= traces.BUCKETS
    assert max(p.high for p in points) == 99.0
    assert min(p.low for p in points) == min(times)
    assert [p.x for p in points] == sorted(p.x for p in points)
    assert 0 <= points[0].x <= points[-1].x <= count - 1


def test_the_frame_leaves_out_rare_spikes_only():
    low, high = traces.frame([[10.0] * 500 + [500.0], [20.0] * 500])
    assert 8.0 < low < 10.0
    assert 20.0 < high < 30.0


def test_a_steady_trace_has_a_frame_of_some_height():
    low, high = traces.frame([[10.0, 10.0]])
    assert low < 10.0 < high


def test_the_page_draws_the_traces_beside_the_records(tmp_path, all_records, make_traces):
    suite = [r for r in all_records if r.suite == "compile"]
    folder = tmp_path / "traces"
    folder.mkdir()
    for name, times in make_traces(200).items():
        (folder / f"{name}.json").write_text(json.dumps(times))
    html = report.build(suite, tmp_path).read_text()
    assert "Iteration by iteration" in html
    assert (tmp_path / "compile-trace.png").exists()
    assert "all 200 iterations in order" in html
    elsewhere = tmp_path / "elsewhere"
    assert "Iteration by iteration" not in report.build(suite, elsewhere).read_text()
    assert "Iteration by iteration" in report.build(suite, elsewhere, trace_folders=[folder]).read_text()
