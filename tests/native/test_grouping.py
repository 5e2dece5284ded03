"""Sources grouped for the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuseline.native.compilers import Compiler
from fuseline.native.grouping import groups
from fuseline.native.recipes import TORCH, torch_recipe


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """Six files of 10 to 60 bytes."""
    made = [tmp_path / f"{name}.cpp" for name in "abcdef"]
    for i, source in enumerate(made):
        source.write_text("x" * 10 * (i + 1))
    return made


@pytest.mark.parametrize("cores, count", [(1, 2), (2, 2), (3, 3), (64, 6)])
def test_as_many_groups_as_cores_and_at_least_two(sources: list[Path], cores: int, count: int) -> None:
    made = groups(sources, cores)
    assert len(made) == count
    assert sorted(source for group in made for source in group) == sources


def test_groups_are_of_about_the_same_size(sources: list[Path]) -> None:
    sizes = [sum(source.stat().st_size for source in group) for group in groups(sources, 3)]
    assert sizes == [70, 70, 70]


def test_the_library_does_not_depend_on_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cxx = Compiler(("g++",), "g++ 12", "")
    made = []
    for cores in (2.0, 8.0):
        monkeypatch.setattr("fuseline.native.recipes.available_cores", lambda cores=cores: cores)
        made.append(torch_recipe(cxx))
    few, many = made
    assert len(few.units) + 6 == len(many.units)
    assert few.key() == many.key()
    for recipe in made:
        compiled = [source for unit in recipe.units for source in unit.sources if source.parent == TORCH]
        assert sorted(compiled) == sorted(TORCH.glob("*.cpp"))
