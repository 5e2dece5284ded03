"""What the site needs beyond docs/: README and others as pages, API pages, links out of docs/, pictures."""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
SOURCES = ROOT / "src"

PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site that stand at the repository's root."""

PACKAGES = ("ops", "nn", "optim", "picker", "quant", "native", "records", "timing")
"""Their `__all__` is their API, so that a new op has its page without a change here."""

MODULES = {
    "training": ("fuseline.training.step", "fuseline.training.optimizer", "fuseline.training.config"),
    "generation": (
        "fuseline.generation.generate",
        "fuseline.generation.decoder",
        "fuseline.generation.choice",
        "fuseline.generation.beam_search",
    ),
    "models": (
        "fuseline.models.gpt",
        "fuseline.models.gpt_block",
        "fuseline.models.gpt_config",
        "fuseline.models.llama",
        "fuseline.models.llama_config",
        "fuseline.models.translation",
    ),
}
"""Packages without an `__all__`: the modules whose public names are shown."""

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
PICTURE = re.compile(
    r"<picture>\s*<source[^>]*srcset=\"([^\"]+)\">\s*<img alt=\"([^\"]+)\" src=\"([^\"]+)\">\s*</picture>"
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/."""
    for page, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for package in PACKAGES:
        files.append(File.generated(config, f"api/{package}.md", content=_package(package)))
    for package, modules in MODULES.items():
        lines = [f"# fuseline.{package}", *(f"\n::: {module}" for module in modules)]
        files.append(File.generated(config, f"api/{package}.md", content="\n".join(lines) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links and pictures as the site has them; what is no page of the site is named, not linked."""
    source = PAGES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = posixpath.dirname(source)

    def linked(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(here, target))
        on_site = next((name for name, at in PAGES.items() if at == path), None)
        if on_site is None and path.startswith("docs/"):
            on_site = path.removeprefix("docs/")
        if on_site is None:
            return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"
        folder = posixpath.dirname(page.file.src_uri)
        return f"[{text}]({posixpath.relpath(on_site, folder or '.')}{anchor})"

    def shown(match: re.Match[str]) -> str:
        folder = posixpath.dirname(page.file.src_uri)
        at = [
            posixpath.relpath(posixpath.normpath(posixpath.join(here, image)), posixpath.join("docs", folder))
            for image in (match[3], match[1])
        ]
        return f"![{match[2]}]({at[0]}#only-light)\n![{match[2]}]({at[1]}#only-dark)"

    return PICTURE.sub(shown, LINK.sub(linked, markdown))


def _package(name: str) -> str:
    """A page with a section for each module that a package's `__all__` takes names from."""
    folder = SOURCES / "fuseline" / name
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    public = next(
        set(ast.literal_eval(node.value))
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    lines = [f"# fuseline.{name}", "", ast.get_docstring(tree) or ""]
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("fuseline."):
            continue
        source = SOURCES / str(node.module).replace(".", "/")
        names = [alias.name for alias in node.names if (alias.asname or alias.name) in public]
        modules = [member for member in names if (source / f"{member}.py").exists()]
        members = [member for member in names if member not in modules]
        if members:
            lines += ["", f"::: {node.module}", "    options:", f"      members: {members}"]
        lines += [f"\n::: {node.module}.{module}" for module in modules]
    return "\n".join(lines) + "\n"
