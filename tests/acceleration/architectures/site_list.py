"""`sites.json` read: which sites of a model are to be found, may be found, or must be refused."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

KINDS = (
    "layer_norm",
    "rms_norm",
    "activation",
    "mlp",
    "gated_mlp",
    "attention",
    "rotary",
    "embedding",
    "patch_embedding",
    "residual_norm",
    "head_loss",
    "linear",
)
"""Linear layers are sites on a GPU alone, and no list names them."""

_FILE = Path(__file__).with_name("sites.json")


@dataclass(frozen=True)
class ListedSite:
    """One site of one model: its kind and path, and what else is the same thing under another name."""

    kind: str
    path: str
    others: tuple[tuple[str, str], ...] = ()
    """(kind, path) of the alternatives."""
    why: str = ""

    @property
    def paths(self) -> frozenset[str]:
        return frozenset({self.path, *(path for _, path in self.others)})

    def is_met_by(self, kind: str, path: str) -> bool:
        """Whether a row of this kind and path stands for the site.

        A norm that was merged with the sum before it, and a head that is reported at the model, count.
        """
        if (kind, path) in {(self.kind, self.path), *self.others}:
            return True
        if self.kind in ("layer_norm", "rms_norm"):
            return kind == "residual_norm" and path == self.path
        return self.kind == "head_loss" and kind == "head_loss" and path == ""

    def __str__(self) -> str:
        return f"{self.kind} at {self.path or 'the model itself'}"


@dataclass(frozen=True)
class SiteList:
    must: tuple[ListedSite, ...]
    may: tuple[ListedSite, ...]
    refuse: tuple[ListedSite, ...]


def listed_names() -> list[str]:
    return list(_read())


def site_list(name: str, model: nn.Module) -> SiteList:
    """The sites listed for `name`, every * replaced by the indices that `model` has."""
    entry = _read()[name]
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]

    def section(key: str) -> tuple[ListedSite, ...]:
        return tuple(
            site
            for kind, patterns in entry.get(key, {}).items()
            for pattern in patterns
            for site in _expanded(kind, pattern, patterns[pattern] if key != "must" else "", paths)
        )

    return SiteList(section("must"), section("may"), section("refuse"))


def _read() -> dict[str, Any]:
    models: dict[str, Any] = json.loads(_FILE.read_text())["models"]
    return models


def _expanded(kind: str, pattern: str, why: str, paths: list[str]) -> list[ListedSite]:
    if kind not in KINDS:
        raise ValueError(f"sites.json: {kind!r} is none of the kinds {', '.join(KINDS)}.")
    first, *rest = (part.strip() for part in pattern.split("|"))
    wanted = "" if first == "." else first
    expression = re.compile(re.escape(wanted).replace(r"\*", r"(\d+)"))
    sites = []
    for path in paths:
        if match := expression.fullmatch(path):
            others = tuple(_alternative(kind, other, match.groups()) for other in rest)
            sites.append(ListedSite(kind, path, others, why))
    if not sites:
        raise ValueError(f"sites.json: no module of the model is at {first!r} (listed as {kind}).")
    return sites


def _alternative(kind: str, text: str, indices: tuple[str, ...]) -> tuple[str, str]:
    if ":" in text:
        kind, text = text.split(":")
    for index in indices[: text.count("*")]:
        text = text.replace("*", index, 1)
    return kind, "" if text == "." else text
