"""Which layout the table takes from measured times, and that its text is read back as it was written."""

from __future__ import annotations

import re

import pytest

from fuseline.errors import InputError
from fuseline.native.kernels import FAMILIES
from fuseline.native.layouts import (
    RULES,
    TABLE,
    Layout,
    by_layout,
    candidates,
    choose,
    clustered,
    over_ranges,
    read,
    waiting,
    waits,
    write,
)

SMALL, LARGE, STAYING = Layout(1, 128), Layout(4, 512), Layout(8, 512, 2, 3)


def test_the_fastest_layout_is_taken_and_neighbours_are_joined() -> None:
    times = {
        64: {SMALL: 1.0, LARGE: 2.0},
        128: {SMALL: 1.0, LARGE: 1.5},
        256: {SMALL: 3.0, LARGE: 2.0},
    }
    assert choose(times) == [(128, SMALL), (256, LARGE)]


def test_a_layout_stays_where_another_is_hardly_faster() -> None:
    assert choose({8: {SMALL: 1.0}, 16: {SMALL: 1.004, LARGE: 1.0}}) == [(16, SMALL)]
    assert choose({8: {SMALL: 1.0}, 16: {SMALL: 1.05, LARGE: 1.0}}) == [(8, SMALL), (16, LARGE)]


def test_a_line_has_the_layout_that_is_fine_at_all_of_its_lengths() -> None:
    times = {8: {SMALL: 1.0, LARGE: 1.001}, 16: {SMALL: 1.2, LARGE: 1.0}, 32: {SMALL: 1.0, LARGE: 2.0}}
    assert choose(times) == [(16, LARGE), (32, SMALL)]


def test_layouts_that_are_one_at_a_length_have_one_time() -> None:
    def taken(n: int, layout: Layout) -> int:
        return min(layout.block // n, 4)

    times = {32: {4: 1.0, 2: 2.0}, 128: {1: 1.0, 4: 1.5}, 256: {0: 2.0, 2: 1.0}}
    layouts = [Layout(1, 128), Layout(1, 512)]
    assert choose(by_layout(times, layouts, taken)) == [(128, Layout(1, 128)), (256, Layout(1, 512))]


def test_a_range_is_judged_by_both_its_ends() -> None:
    high, low, fair = (
        Layout(0, 64, kernel="copied"),
        Layout(0, 96, kernel="copied"),
        Layout(0, 128, kernel="copied"),
    )
    times = {
        8: {high: 1.0, low: 1.1},
        16: {high: 1.0, low: 2.0},
        17: {high: 1.0, low: 1.5},
        64: {high: 1.0, low: 2.0, fair: 1.2},
        65: {high: 3.0, low: 1.0, fair: 1.1},
        90: {high: 1.0, low: 2.0, fair: 1.2},
    }
    found = over_ranges(times, {16: 17, 64: 65, 128: 129}, {90})
    assert sorted(found) == [8, 16, 63, 64, 90]
    assert [found[n] for n in (8, 16, 64)] == [times[n] for n in (8, 16, 64)]
    assert found[63] == {high: 3.0, low: 1.5}  # from behind 16 to before 64
    assert found[90] == {high: 3.0, low: 2.0, fair: 1.2}
    found = over_ranges(times, {16: 17, 64: 65})
    assert found[89] == {high: 3.0, low: 2.0, fair: 1.2}
    assert found[90] == times[90]  # is asked for: it has a line of its own
    assert over_ranges({8: {high: 1.0}, 16: {high: 2.0}}, {16: 17}) == {8: {high: 1.0}, 16: {high: 2.0}}


def test_a_length_that_nothing_runs_is_named() -> None:
    with pytest.raises(InputError, match="rows of 512"):
        choose({512: {}})


def test_what_is_written_is_read_back() -> None:
    lines = [(128, SMALL), (65536, STAYING), (131072, Layout(0, 256, 8, 1, "copied"))]
    table = {(family, size): lines for family in FAMILIES[1:] for size in (2, 4)}
    text = write(table, FAMILIES, "GPU of some name")
    assert read(text) == table
    assert "GPU of some name" in text


def test_the_table_in_use_is_as_it_would_be_written() -> None:
    text = TABLE.read_text()
    table = read(text)
    device = re.search(r"times on an (.*); edit", text)
    assert device is not None
    assert set(table) == {(family, size) for family in FAMILIES for size in (2, 4)}
    assert write(table, FAMILIES, device[1]) == text
    for lines in table.values():
        assert [longest for longest, _ in lines] == sorted({longest for longest, _ in lines})


@pytest.mark.parametrize("element_size", [2, 4])
def test_every_line_holds_its_longest_row(element_size: int) -> None:
    for (family, size), lines in read(TABLE.read_text()).items():
        for longest, layout in lines:
            if size == element_size and layout.kernel == RULES.kernel and not family.startswith("many"):
                assert layout.threads(longest, size) <= layout.block, (family, longest)


@pytest.mark.parametrize("element_size", [2, 4])
def test_what_the_norms_lines_say_is_tried(element_size: int) -> None:
    table = read(TABLE.read_text())
    for longest, layout in table["layer_norm_forward", element_size]:
        tried = [*candidates(longest, element_size, (1, 2, 4), ()), *waiting(longest, element_size)]
        assert layout in tried, longest
    for longest, layout in table["layer_norm_backward", element_size]:
        assert layout in clustered(longest, element_size, (1, 2, 4)), longest


def test_candidates_hold_the_row() -> None:
    for n in (1, 64, 1000, 4096, 50257, 262144):
        for layout in candidates(n, 2, (1, 2, 4), (4, 8)):
            assert layout.threads(n, 2) * layout.held * layout.cluster * 8 >= n
            assert layout.threads(n, 2) <= layout.block
    assert Layout(1, 128) in candidates(64, 2, (1, 2, 4), (4, 8))
    assert Layout(8, 512, 2, 3) in candidates(65536, 2, (1, 2, 4), (4, 8))
    assert Layout(8, 512, 8, 1) not in candidates(1024, 2, (1, 2, 4), (4, 8)), "blocks with nothing to do"


def test_text_without_a_table_is_refused() -> None:
    with pytest.raises(InputError, match="No table"):
        read("// nothing")


def test_clusters_share_what_a_block_does_not_hold() -> None:
    assert list(clustered(64, 2, (1, 2))) == [Layout(1, 256), Layout(2, 256)]
    shared = list(clustered(16384, 2, (1, 2)))
    assert Layout(1, 256, 8) in shared
    assert Layout(2, 512, 2) in shared
    assert all(layout.threads(16384, 2) <= layout.block for layout in shared)
    assert not any(layout.cluster == 1 for layout in shared if layout.stages == 0)
    assert Layout(4, 512, 1, 4) in shared
    assert Layout(4, 512, 1, 6) in shared
    assert Layout(4, 512, 2, 6) in shared


def test_rows_that_wait_are_spread_over_clusters() -> None:
    tried = list(waiting(65536, 2))
    assert Layout(16, 128, 4, 1) in tried
    assert Layout(8, 128, 8, 1) in tried
    assert all(layout.threads(65536, 2) == layout.block and layout.fits(65536, 2) for layout in tried)
    assert not list(waiting(256, 2))


def test_blocks_that_wait_have_room_for_their_part_of_a_row() -> None:
    assert Layout(0, 128, 8, 1, "copied") in list(waits(65536, 2))
    assert not list(waits(64, 2))
    assert {layout.cluster for layout in waits(262144, 4, 2)} == {16}
