"""Translate sentences with a model that `fuseline train translate` trained.

Sentences are given as arguments, in a file (--input), or on standard input, one a line; a translation a line
comes back.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fuseline.cli.options import Common, check_text, resolve_device
from fuseline.errors import InputError
from fuseline.files.reading import read_text, reason
from fuseline.files.writing import write_text


@dataclass(frozen=True)
class Options(Common):
    sentences: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """What to translate."""
    checkpoint: Path | None = None
    """Folder of a run, or its best.pt or latest.pt."""
    input: Path | None = None
    """File of sentences, one a line; - for standard input."""
    beams: int = 5
    """Beams of the search; 1 is greedy."""
    length_penalty: float = 1.0
    """Exponent of the length penalty; above 1 favours longer texts."""
    precision: str = "fp32"
    """fp32, tf32, bf16, fp16."""
    out: Path | None = None
    """File for the translations, in place of standard output."""


def run(options: Options) -> int:
    if options.checkpoint is None:
        raise InputError("Name the run to translate with: --checkpoint FOLDER.")
    sentences = _sentences(options)
    if options.dry_run:
        print(f"{len(sentences)} sentence(s) would be translated by {options.checkpoint}.")
        return 0
    from fuseline.training.translator import Translator

    translator = Translator.load(
        options.checkpoint, device=resolve_device(options.device), precision=options.precision
    )
    texts = translator.translate(sentences, beams=options.beams, length_penalty=options.length_penalty)
    lines = "".join(f"{text}\n" for text in texts)
    if options.json:
        print(json.dumps({"sources": sentences, "translations": texts}, ensure_ascii=False))
    elif options.out is not None:
        try:
            write_text(options.out, lines)
        except OSError as error:
            raise InputError(f"Cannot write {options.out}: {reason(error)}. Give another --out.") from error
    else:
        sys.stdout.write(lines)
    return 0


def _sentences(options: Options) -> list[str]:
    if options.sentences and options.input is not None:
        raise InputError("Give sentences as arguments or by --input, not both.")
    if options.sentences:
        check_text("A sentence", options.sentences)
        return list(options.sentences)
    if options.input is None and sys.stdin.isatty():
        raise InputError('Nothing to translate: give sentences as arguments ("ein Satz"), or --input FILE.')
    try:
        text = (
            sys.stdin.read()
            if options.input is None or str(options.input) == "-"
            else read_text(options.input)
        )
    except UnicodeDecodeError as error:
        raise InputError(f"What stands on standard input is not UTF-8 text: {error}.") from error
    return text.removesuffix("\n").split("\n")
