"""Every link and image of the documents leads somewhere, and so does every document that the code names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .documents import DOCUMENTS, ROOT, name

_TARGETS = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
_NAMED = re.compile(r"(?<!/)\b((?:docs|examples|benchmarks)/[\w/.-]+\.(?:md|py|svg))\b")


def slugs(document: Path) -> set[str]:
    """The anchors that a reader's browser finds: a heading's words in lower case, joined by hyphens."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_relative_links_and_images_exist(document: Path) -> None:
    for match in _TARGETS.finditer(document.read_text(encoding="utf-8")):
        target = match[1] or match[2]
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), f"{name(document)} links to {target}, which is not there"
        if anchor:
            assert anchor in slugs(found), f"{name(document)} links to {target}; there is no such heading"


def test_documents_that_sources_name_exist() -> None:
    sources = [
        file
        for folder in ("src", "tests", "benchmarks", "examples")
        for kind in ("py", "cu", "cuh", "cpp", "h")
        for file in (ROOT / folder).rglob(f"*.{kind}")
    ]
    for file in sources:
        for path in _NAMED.findall(file.read_text(encoding="utf-8", errors="replace")):
            assert (ROOT / path).exists(), f"{file.relative_to(ROOT)} names {path}, which is not there"


def test_the_front_page_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150, f"README.md has {len(lines)} lines; what is longer belongs into docs/"
