"""The documents that people read, and what stands in their fenced blocks."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`]+)`")


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks of that language ("" for those that name none)."""
    return [text for found, text in _BLOCK.findall(document.read_text(encoding="utf-8")) if found == language]


def commands(document: Path) -> list[str]:
    """The lines of the blocks without a language, their comments taken off."""
    lines = [line for block in blocks(document, "") for line in block.splitlines()]
    return [command for line in lines if (command := re.sub(r"(^|\s)# .*", "", line).strip())]


def prose(document: Path) -> str:
    """The text outside of fenced blocks, each line break a space."""
    return " ".join(_BLOCK.sub("", document.read_text(encoding="utf-8")).split())


def inline_code(document: Path) -> list[str]:
    return _INLINE.findall(prose(document))
