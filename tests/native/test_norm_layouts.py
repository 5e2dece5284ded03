"""What is tried of the norms' layouts for many rows, and that the table's lines are of these."""

from __future__ import annotations

import pytest
import torch

from fuseline.native.kernels import FAMILIES, NORMS
from fuseline.native.layouts import OWN_WIDTHS, ROW_KERNELS, RULES, TABLE, Layout, read
from fuseline.native.norm_layouts import every_layout, norm_layouts, taken
from fuseline.ops.plans import explain

LENGTHS = (8, 64, 256, 384, 768, 1000, 1600, 4096, 12288, 16384, 65536, 131072, 262144)
EACH = [(norm, direction, size) for norm in NORMS for direction in ("forward", "backward") for size in (2, 4)]


@pytest.mark.parametrize(("norm", "direction", "size"), EACH)
def test_layouts_that_are_tried_differ_and_are_known(norm: str, direction: str, size: int) -> None:
    for n in LENGTHS:
        tried = list(norm_layouts(norm, direction, n, size))
        assert RULES in tried
        assert len({taken(norm, direction, n, size, layout) for layout in tried}) == len(tried)
        assert {layout.kernel for layout in tried} <= set(ROW_KERNELS)


def test_x_alone_comes_in_lighter_blocks_and_rings_are_the_backwards() -> None:
    kernels = {norm: {one.kernel for one in norm_layouts(norm, "forward", 32768, 2)} for norm in NORMS}
    assert "light" in kernels["rms_norm"]
    assert "light" not in kernels["add_rms_norm"]
    assert all("ring" not in found for found in kernels.values())
    assert "ring" in {one.kernel for one in norm_layouts("add_rms_norm", "backward", 32768, 2)}


def test_blocks_of_several_rows_are_told_by_how_many_they_have() -> None:
    one = [
        taken("layer_norm", "forward", 4096, 2, Layout(4, block, kernel="held")) for block in (64, 128, 256)
    ]
    assert one[0] == one[1] != one[2]
    assert taken("layer_norm", "forward", 65536, 2, Layout(4, 512, kernel="held")) is None


def test_every_family_of_many_rows_is_a_norm_and_a_direction() -> None:
    many = [family for family in FAMILIES if family.startswith("many_")]
    assert many == [f"many_{norm}_{way}" for norm in NORMS for way in ("forward", "backward")]


@pytest.mark.parametrize(("norm", "direction", "size"), EACH)
def test_the_tables_lines_are_layouts_of_their_longest_rows(norm: str, direction: str, size: int) -> None:
    for longest, layout in read(TABLE.read_text()).get((f"many_{norm}_{direction}", size), []):
        assert layout in set(every_layout(direction))
        assert taken(norm, direction, longest, size, layout), longest


def test_an_h200_has_lines_of_its_own_for_exact_widths() -> None:
    own = read(OWN_WIDTHS.read_text())
    assert len(own) > 3
    for (family, size), lines in own.items():
        norm, _, direction = family.removeprefix("many_").rpartition("_")
        for width, layout in lines:
            assert size == 2
            assert layout in set(every_layout(direction))
            assert taken(norm, direction, width, size, layout), (family, width)


def test_a_width_takes_its_gpus_line_and_others_the_nearest_gpus() -> None:
    def layout(n: int, gpu: str) -> tuple[object, ...]:
        (plan,) = explain("add_rms_norm", (8192, n), torch.bfloat16, gpu=gpu, direction="backward").plans
        return plan.kernel, plan.threads_per_row, plan.rows_per_block

    assert layout(2048, "h200") != layout(2048, "h100")
    assert layout(2056, "h200") == layout(2056, "h100")
    assert layout(2048, "b200") == layout(2048, "h200")
