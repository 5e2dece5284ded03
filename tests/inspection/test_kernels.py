"""A library's kernels for a GPU: which code it runs, what is static, which names match."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuseline.errors import InputError
from fuseline.inspection import GPUS, Cuobjdump, Gpu, Kernels, read_kernels
from fuseline.inspection.cubin import Bounds

HOPPER = GPUS["sm_90"]


@pytest.fixture
def known(tool: Cuobjdump, library: Path) -> Kernels:
    return read_kernels(tool, library, HOPPER)


def test_names_resources_and_bounds_come_together(known: Kernels) -> None:
    assert [(one.name, one.bounds) for one in known.kernels] == [
        ("plain", Bounds(None, 1)),
        ("scale_rows<bf16, 256>", Bounds(256, 1)),
        ("spilled", Bounds(1024, 0)),
    ]
    assert [one.resources.local for one in known.kernels] == [0, 0, 400]
    assert known.remark == ""


def test_what_cuda_reserves_is_no_kernels_own(tool: Cuobjdump, library: Path) -> None:
    for gpu in ("sm_80", "sm_90", "sm_100"):  # compilers count it from sm_90 on
        kernels = read_kernels(tool, library, GPUS[gpu]).kernels
        assert [one.shared for one in kernels] == [0, 256, 0]


def test_occupancy_at_the_bounds_and_at_what_is_asked_for(known: Kernels) -> None:
    plain, scale_rows, _ = known.kernels
    assert plain.occupancy(HOPPER) is None
    found = plain.occupancy(HOPPER, threads=128)
    assert found is not None
    assert found.blocks == 16
    found = scale_rows.occupancy(HOPPER)
    assert found is not None
    assert (found.blocks, found.limited_by) == (8, ("threads",))
    found = scale_rows.occupancy(HOPPER, shared=100_000)
    assert found is not None
    assert (found.blocks, found.limited_by) == (2, ("shared memory",))


def test_more_threads_than_the_bounds_do_not_launch(known: Kernels) -> None:
    found = known.kernels[1].occupancy(HOPPER, threads=512)
    assert found is not None
    assert (found.blocks, found.limited_by) == (0, ("launch bounds",))


@pytest.mark.parametrize(
    "gpu, architecture, is_stand_in",
    [("sm_80", "sm_80", False), ("sm_89", "sm_80", False), ("sm_100", "sm_100", False)],
)
def test_the_code_that_a_gpu_runs(
    tool: Cuobjdump, library: Path, gpu: str, architecture: str, is_stand_in: bool
) -> None:
    known = read_kernels(tool, library, GPUS[gpu])
    assert {one.resources.architecture for one in known.kernels} == {architecture}
    assert bool(known.remark) == is_stand_in


def test_older_code_stands_in_with_a_word_of_it(tool: Cuobjdump, library: Path) -> None:
    later = Gpu((12, 0), "RTX 50", 1536, 24, 102_400, 101_376)
    known = read_kernels(tool, library, later)
    assert {one.resources.architecture for one in known.kernels} == {"sm_100"}
    assert "no machine code for sm_120" in known.remark


def test_a_gpu_older_than_all_code_is_refused(tool: Cuobjdump, library: Path) -> None:
    with pytest.raises(InputError, match=r"none that sm_75 runs.*--arch 7\.5"):
        read_kernels(tool, library, Gpu((7, 5), "T4", 1024, 16, 65_536, 65_536))


@pytest.mark.parametrize(
    "text, names",
    [
        ("scale_rows<bf16, 256>", ["scale_rows<bf16, 256>"]),
        ("_Z7spilledPfi", ["spilled"]),
        ("BF16 scale", ["scale_rows<bf16, 256>"]),
        ("l", ["plain", "scale_rows<bf16, 256>", "spilled"]),
    ],
)
def test_found_by_name_part_or_words(known: Kernels, text: str, names: list[str]) -> None:
    assert [one.name for one in known.matching(text)] == names


def test_an_unknown_name_is_answered_with_near_ones(known: Kernels) -> None:
    with pytest.raises(InputError, match=r"no kernel named 'scale_row_'\. Did you mean 'scale_rows'"):
        known.matching("scale_row_")
