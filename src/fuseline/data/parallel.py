"""Sentences with their translations: your files, a known corpus, or the embedded German-English task."""

from __future__ import annotations

import gzip
import hashlib
import io
import random
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuseline.data import grammar
from fuseline.errors import InputError, unknown_name
from fuseline.files.reading import read_bytes

Pair = tuple[str, str]
SPLITS = ("train", "validation", "test")
LARGEST = 2**33
"""Bytes of text on one side of a corpus."""

GRAMMAR_TRAIN, GRAMMAR_HELD_BACK = 20_000, 500
# The share of a single file, or pair of files, that is held back for validation, and again for test.
HELD_BACK_SHARE, HELD_BACK_MOST = 0.05, 2000
# Names of the splits in a folder; the first one that exists is used.
_STEMS = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test_2016_flickr", "test_2016", "test2016", "flickr2016", "test"),
}
# Hugging Face data sets: the repository, its revision, and the column that holds the pair if the languages
# have no columns of their own. IWSLT14's main revision is a script, which `datasets` no longer runs since
# version 4.
_HUB = {
    "multi30k": ("bentrevett/multi30k", None, None),
    "iwslt14": ("bbaaaa/iwslt14-de-en", "refs/convert/parquet", "translation"),
}

DOWNLOADED = tuple(_HUB)


@dataclass(frozen=True)
class ParallelCorpus:
    """Pairs (source, target) by split, and the short names of the two languages.

    The fingerprint changes when the text changes.
    """

    name: str
    languages: tuple[str, str]
    splits: Mapping[str, Sequence[Pair]]

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for split in SPLITS:
            for pair in self.splits[split]:
                for text in pair:
                    digest.update(f"{len(text.encode())} ".encode() + text.encode())
        return digest.hexdigest()


def load_parallel(
    spec: str, source: str = "de", target: str = "en", cache_dir: Path | None = None
) -> ParallelCorpus:
    """The corpus that `spec` names, from language `source` to language `target`.

    - "grammar": German and English sentences of this project's own, generated (see `fuseline.data.grammar`).
    - "multi30k", "iwslt14": through the package `datasets`.
    - a folder with `train.<language>`, `val.<language>`, `test.<language>` (or the names of Multi30k and
      IWSLT; also `.gz`), one sentence a line.
    - two files, separated by a comma: `text.de,text.en`.
    - a TSV file: source, tab, target.

    If there are no files for validation and test, some of the pairs are drawn for them. Raises `InputError`
    for missing files, files of unequal length, or a download that fails.
    """
    if source == target:
        raise InputError(f"Source and target language are both {source!r}; name two.")
    if spec == "grammar":
        splits: Mapping[str, Sequence[Pair]] = grammar.generate(GRAMMAR_TRAIN, GRAMMAR_HELD_BACK)
        return ParallelCorpus("grammar", (source, target), _directed(splits, ("de", "en"), (source, target)))
    if spec in _HUB:
        return ParallelCorpus(spec, (source, target), _from_hub(spec, source, target, cache_dir))
    corpus = _from_paths(spec, source, target)
    _check_pairs(corpus)
    return corpus


def _check_pairs(corpus: ParallelCorpus) -> None:
    """`InputError` for a corpus with a split that holds no pair."""
    empty = [split for split in SPLITS if not corpus.splits[split]]
    if empty:
        raise InputError(
            f"{corpus.name} has no pair for {' and '.join(empty)}: a pair is a sentence and its translation, "
            "neither of them empty."
        )


def _directed(
    splits: Mapping[str, Sequence[Pair]], own: tuple[str, str], wanted: tuple[str, str]
) -> Mapping[str, Sequence[Pair]]:
    if wanted == own:
        return splits
    if wanted == own[::-1]:
        return {split: [(b, a) for a, b in pairs] for split, pairs in splits.items()}
    raise InputError(f"This corpus has the languages {' and '.join(own)}, not {' and '.join(wanted)}.")


def _from_paths(spec: str, source: str, target: str) -> ParallelCorpus:
    paths = [Path(part.strip()).expanduser() for part in spec.split(",")]
    missing = [path for path in paths if not path.exists()]
    if missing and len(paths) == 1 and not Path(spec).suffix and "/" not in spec:
        raise unknown_name("file, folder or parallel corpus", spec, ("grammar", *_HUB))
    if missing or len(paths) > 2:
        raise InputError(
            f"There is no {missing[0]} to take sentences from."
            if missing
            else f"{spec!r} names {len(paths)} files; give one TSV file, two files of text, or a folder."
        )
    if len(paths) == 2:
        return ParallelCorpus(paths[0].stem, (source, target), _divided(_aligned(*paths), spec))
    if paths[0].is_dir():
        return ParallelCorpus(paths[0].resolve().name, (source, target), _folder(paths[0], source, target))
    return ParallelCorpus(paths[0].stem, (source, target), _divided(_tsv(paths[0]), spec))


def _folder(folder: Path, source: str, target: str) -> dict[str, list[Pair]]:
    found: dict[str, list[Pair]] = {}
    for split, stems in _STEMS.items():
        for stem in stems:
            files = [_either(folder / f"{stem}.{language}") for language in (source, target)]
            if all(files):
                found[split] = _aligned(*[file for file in files if file is not None])
                break
    if "train" not in found:
        raise InputError(
            f"{folder} holds no train.{source} and train.{target} (or .gz). Name the languages of your files "
            "with --source and --target, or give two files: --data a,b."
        )
    rest = [split for split in SPLITS if split not in found]
    return {**found, **_drawn(found["train"], rest, str(folder))} if rest else found


def _either(path: Path) -> Path | None:
    packed = path.with_name(f"{path.name}.gz")
    return path if path.is_file() else packed if packed.is_file() else None


def _aligned(first: Path, second: Path) -> list[Pair]:
    sources, targets = _lines(first), _lines(second)
    if len(sources) != len(targets):
        raise InputError(
            f"{first} has {len(sources)} lines and {second} {len(targets)}: line n of one must be "
            "the translation of line n of the other."
        )
    return _told(zip(sources, targets, strict=True))


def _lines(path: Path) -> list[str]:
    content = read_bytes(path, LARGEST)
    try:
        text = (_unpacked(content, path) if path.suffix == ".gz" else content).decode("utf-8")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"Cannot read {path}: {error}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}).") from error
    # Not splitlines: a sentence may hold a character that Unicode calls a line separator.
    return text.removesuffix("\n").split("\n")


def _unpacked(content: bytes, path: Path) -> bytes:
    """What a gzip file holds, read no further than a corpus can be long: a few bytes can stand for endless
    zeros."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise InputError(f"{path} holds more than {LARGEST:,} bytes of text.")
    return text


def _tsv(path: Path) -> list[Pair]:
    rows = [line.split("\t") for line in _lines(path) if line.strip()]
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise InputError(
                f"Row {number} of {path} has {len(row)} field(s); a row is a sentence, a tab, its "
                "translation."
            )
    return _told((source, target) for source, target in rows)


def _told(pairs: Iterable[Pair]) -> list[Pair]:
    """The pairs in which neither sentence is empty."""
    stripped = ((source.strip(), target.strip()) for source, target in pairs)
    return [pair for pair in stripped if all(pair)]


def _divided(pairs: list[Pair], where: str) -> dict[str, list[Pair]]:
    return {"train": pairs, **_drawn(pairs, ["validation", "test"], where)}


def _drawn(pairs: list[Pair], splits: Sequence[str], where: str) -> dict[str, list[Pair]]:
    """Take pairs for `splits` out of `pairs`. All pairs of one source sentence go to the same split."""
    count = min(HELD_BACK_MOST, int(len(pairs) * HELD_BACK_SHARE))
    if count < 1:
        raise InputError(
            f"{where} has {len(pairs)} pairs; with {round(1 / HELD_BACK_SHARE)} or more, some can be "
            "held back for validation and test."
        )
    sources = sorted({source for source, _ in pairs})
    random.Random(0).shuffle(sources)
    split_of = {
        source: split for i, split in enumerate(splits) for source in sources[i * count : (i + 1) * count]
    }
    held = {split: [pair for pair in pairs if split_of.get(pair[0]) == split] for split in splits}
    pairs[:] = [pair for pair in pairs if pair[0] not in split_of]
    return held


def _from_hub(name: str, source: str, target: str, cache_dir: Path | None) -> dict[str, list[Pair]]:
    repository, revision, column = _HUB[name]
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"Reading {name} needs the package `datasets`: pip install 'fuseline[datasets]'. "
            "A folder with its files works without it: --data PATH."
        ) from error
    options: dict[str, Any] = (
        {} if cache_dir is None else {"cache_dir": str(cache_dir / "corpora" / "datasets")}
    )
    if revision is not None:
        options["revision"] = revision
    try:
        dataset = datasets.load_dataset(repository, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"`datasets` cannot load {name} from {repository}: {error}. Without a network, get its "
            "files where there is one and name their folder: --data PATH."
        ) from error
    found = {}
    for split in SPLITS:
        rows = dataset[split] if column is None else [row[column] for row in dataset[split]]
        if len(rows) and not {source, target} <= set(rows[0]):
            raise InputError(f"{name} has {', '.join(sorted(rows[0]))}, not {source} and {target}.")
        found[split] = _told((row[source], row[target]) for row in rows)
    return found
