from __future__ import annotations

import gzip
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from fuseline.data import parallel
from fuseline.data.parallel import load_parallel
from fuseline.errors import InputError

PAIRS = [(f"Satz {n}", f"sentence {n}") for n in range(60)]


def write(path: Path, lines: list[str]) -> Path:
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_the_embedded_corpus_goes_both_ways() -> None:
    there, back = load_parallel("grammar"), load_parallel("grammar", "en", "de")
    assert there.splits["test"][0] == back.splits["test"][0][::-1]
    assert there.fingerprint != back.fingerprint
    with pytest.raises(InputError, match="languages de and en"):
        load_parallel("grammar", "fr", "en")


def test_a_folder_as_multi30k_has_it(tmp_path: Path) -> None:
    for stem, pairs in (("train", PAIRS), ("val", PAIRS[:3]), ("test_2016_flickr", PAIRS[3:5])):
        write(tmp_path / f"{stem}.de.gz", [de for de, _ in pairs])
        write(tmp_path / f"{stem}.en", [en for _, en in pairs])
    corpus = load_parallel(str(tmp_path))
    assert list(corpus.splits["train"]) == PAIRS
    assert list(corpus.splits["validation"]) == PAIRS[:3]
    assert list(corpus.splits["test"]) == PAIRS[3:5]


def test_two_files_and_a_tsv_are_divided_alike(tmp_path: Path) -> None:
    pairs = [*PAIRS, ("Satz 7", "phrase 7"), ("", "nothing")]
    first = write(tmp_path / "a.txt", [de for de, _ in pairs])
    second = write(tmp_path / "b.txt", [en for _, en in pairs])
    table = write(tmp_path / "c.tsv", [f"{de}\t{en}" for de, en in pairs])
    corpus = load_parallel(f"{first},{second}")
    assert corpus.splits == load_parallel(str(table)).splits
    sources = {split: {de for de, _ in found} for split, found in corpus.splits.items()}
    assert not sources["train"] & (sources["validation"] | sources["test"])
    assert sum(map(len, corpus.splits.values())) == len(PAIRS) + 1  # the empty one is left out
    assert len(corpus.splits["validation"]) >= 3 <= len(corpus.splits["test"])


def test_it_says_what_is_wrong(tmp_path: Path) -> None:
    first = write(tmp_path / "a.txt", ["x", "y"])
    second = write(tmp_path / "b.txt", ["x"])
    table = write(tmp_path / "c.tsv", ["x\ty\tz"])
    for spec, message in (
        (f"{first},{second}", "2 lines"),
        (str(table), r"3 field\(s\)"),
        (str(tmp_path), "no train.de"),
        (str(tmp_path / "nothing.tsv"), "There is no"),
        ("multi31k", "multi30k"),
        (f"{second},{second}", "1 pairs"),
    ):
        with pytest.raises(InputError, match=message):
            load_parallel(spec)
    with pytest.raises(InputError, match="both 'de'"):
        load_parallel("grammar", "de", "de")


@pytest.mark.parametrize("name", ["multi30k", "iwslt14"])
def test_the_package_datasets_gives_pairs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package itself, over local files with the columns and features that the two have."""
    datasets = pytest.importorskip("datasets")
    rows = [{"de": de, "en": en} for de, en in PAIRS]
    nested = parallel._HUB[name][2] is not None
    features = datasets.Features({"translation": datasets.Translation(["de", "en"])}) if nested else None
    splits = {"train": rows, "validation": rows[:2], "test": rows[2:4]}
    for split, group in splits.items():
        made = [{"translation": row} for row in group] if nested else group
        path = tmp_path / "repository" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(exist_ok=True)
        datasets.Dataset.from_list(made, features=features).to_parquet(path)
    monkeypatch.setitem(parallel._HUB, name, (str(tmp_path / "repository"), *parallel._HUB[name][1:]))
    corpus = load_parallel(name, cache_dir=tmp_path / "cache")
    assert corpus.splits == {"train": PAIRS, "validation": PAIRS[:2], "test": PAIRS[2:4]}
    turned = load_parallel(name, "en", "de", cache_dir=tmp_path / "cache")
    assert turned.splits["test"] == [(en, de) for de, en in PAIRS[2:4]]


def test_multi30k_and_iwslt_come_through_datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [{"de": de, "en": en} for de, en in PAIRS]
    asked = []

    def load_dataset(repository: str, **options: Any) -> dict[str, list[Any]]:
        asked.append((repository, options))
        nested = [{"translation": row} for row in rows] if "iwslt" in repository else rows
        return {"train": nested, "validation": nested[:2], "test": nested[2:4]}

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)  # type: ignore[arg-type]
    assert list(load_parallel("multi30k", cache_dir=tmp_path).splits["train"]) == PAIRS
    assert list(load_parallel("iwslt14").splits["test"]) == PAIRS[2:4]
    assert asked[0][0] == "bentrevett/multi30k"
    assert asked[1] == ("bbaaaa/iwslt14-de-en", {"revision": "refs/convert/parquet"})
    assert str(tmp_path) in asked[0][1]["cache_dir"]
    with pytest.raises(InputError, match="not fr and en"):
        load_parallel("multi30k", "fr", "en")

    def offline(repository: str, **options: Any) -> None:
        raise ConnectionError("no route")

    fake.load_dataset = offline
    with pytest.raises(InputError, match="Without a network"):
        load_parallel("multi30k")
    monkeypatch.setitem(sys.modules, "datasets", None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"fuseline\[datasets\]"):
        load_parallel("multi30k")
