"""What libraries are built from: torch's folders are those that torch names itself."""

from __future__ import annotations

from torch.utils import cpp_extension

from fuseline.native import recipes


def test_torchs_folders_are_where_torch_says() -> None:
    assert recipes.torch_include_paths() == cpp_extension.include_paths("cpu")
    assert [recipes.torch_library_path()] == cpp_extension.library_paths("cpu")
