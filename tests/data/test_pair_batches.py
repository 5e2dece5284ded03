from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fuseline.data.pair_batches import PairBatches, prompt
from fuseline.data.pair_tokens import (
    EOS,
    PAD,
    SOURCE_TAG,
    TARGET_TAG,
    PairDataset,
    PairTokenizer,
    prepare_pairs,
)
from fuseline.data.parallel import ParallelCorpus
from fuseline.errors import InputError

PAIRS = [(f"Satz {n} {'lang ' * (n % 19)}", f"sentence {n} {'long ' * (n % 17)}") for n in range(150)]
CORPUS = ParallelCorpus("made", ("de", "en"), {"train": PAIRS, "validation": PAIRS[:9], "test": PAIRS[9:12]})


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def dataset(cache: Path) -> PairDataset:
    return prepare_pairs(CORPUS, vocab_size=290, cache_dir=cache)


def batches(dataset: PairDataset, **options: Any) -> PairBatches:
    chosen = {
        "encoder_decoder": True,
        "max_tokens": 512,
        "length": 64,
        "seed": 3,
        "device": "cpu",
        **options,
    }
    return PairBatches(dataset.train, **chosen)


def test_text_comes_back_and_digits_are_spelled(dataset: PairDataset) -> None:
    tokenizer = dataset.tokenizer
    texts = ["Satz 12 lang", "ein  Wort, das es nie gab: ßéλ", "<eos> <de> <pad>"]
    ids = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(i) for i in ids] == texts
    assert all(i > TARGET_TAG for row in ids for i in row)  # text is never a special token
    seven, seventy = tokenizer.encode_batch(["7", "77"])
    assert seventy == [*seven, seven[-1]]
    assert tokenizer.decode([*ids[0], EOS, *ids[1]]) == texts[0]


def test_a_saved_tokenizer_is_the_same(dataset: PairDataset, tmp_path: Path) -> None:
    dataset.tokenizer.save(tmp_path / "t.json")
    again = PairTokenizer.load(tmp_path / "t.json")
    assert again.encode_batch(["Satz 3"]) == dataset.tokenizer.encode_batch(["Satz 3"])
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(InputError, match="not a translation tokenizer"):
        PairTokenizer.load(tmp_path / "t.json")


def test_dropout_cuts_in_several_ways_and_is_kept(cache: Path) -> None:
    first = prepare_pairs(CORPUS, vocab_size=290, dropout=0.5, variants=3, cache_dir=cache)
    again = prepare_pairs(CORPUS, vocab_size=290, dropout=0.5, variants=3, cache_dir=cache)
    assert len(first.train) == 3
    cuts = [[list(s) for s in variant.source] for variant in first.train]
    assert cuts[0] != cuts[1] != cuts[2]
    assert cuts == [[list(s) for s in variant.source] for variant in again.train]
    for variant in cuts:
        assert [first.tokenizer.decode(ids) for ids in variant] == [de.strip() for de, _ in PAIRS]


@pytest.mark.parametrize("variants", [1, 3])
def test_an_epoch_has_every_pair_once(cache: Path, variants: int) -> None:
    dataset = prepare_pairs(
        CORPUS, vocab_size=290, dropout=0.3 if variants > 1 else 0.0, variants=variants, cache_dir=cache
    )
    loader = batches(dataset, length=128, max_tokens=1024)
    for epoch in range(2):
        found = []
        for _ in range(loader.batches_per_epoch):
            source, tokens, targets = next(loader)
            assert source.shape == tokens.shape == targets.shape
            assert source.numel() <= 1024
            for row in range(len(source)):
                if (targets[row] >= 0).any():
                    read = [i for i in source[row].tolist() if i != PAD]
                    written = [i for i in targets[row].tolist() if i >= 0]
                    assert (read[0], read[-1], written[-1], int(tokens[row, 0])) == (
                        SOURCE_TAG,
                        EOS,
                        EOS,
                        TARGET_TAG,
                    )
                    assert tokens[row, 1 : len(written)].tolist() == written[:-1]
                    decode = dataset.tokenizer.decode
                    found.append((decode(read), decode(written)))
        expected = sorted((de.strip(), en.strip()) for de, en in PAIRS)
        assert sorted(found) == expected, epoch
    assert 0 < loader.padding < 0.9  # rows in eights, of few pairs


def test_a_decoder_only_sequence_learns_its_target_alone(dataset: PairDataset) -> None:
    loader = batches(dataset, encoder_decoder=False, max_tokens=512, length=64)
    tokens, targets = next(loader)
    for row in range(len(tokens)):
        sequence = [i for i in tokens[row].tolist() if i != PAD]
        learned = [i for i in targets[row].tolist() if i >= 0]
        if learned:
            tag = sequence.index(TARGET_TAG)
            assert sequence[0] == SOURCE_TAG
            assert [*sequence[tag + 1 :], EOS] == learned
            assert targets[row, tag].item() == learned[0]
            assert (targets[row, :tag] == -1).all()


def test_batch_number_i_is_a_function_of_the_seed(dataset: PairDataset) -> None:
    whole = batches(dataset)
    count = 2 * whole.batches_per_epoch + 1
    course = [next(whole) for _ in range(count)]
    later = batches(dataset, start=5)
    assert all(torch.equal(a, b) for a, b in zip(next(later), course[5], strict=True))
    second = batches(dataset, start=1, stride=2)
    for i in range(1, count, 2):
        assert torch.equal(next(second)[0], course[i][0])
    other = batches(dataset, seed=4)
    assert any(
        a[0].shape != b[0].shape or not torch.equal(a[0], b[0])
        for a, b in ((next(other), c) for c in course[:5])
    )


def test_there_are_few_shapes_and_one_without_buckets(dataset: PairDataset) -> None:
    assert 2 <= len({next_[0].shape for next_ in batches(dataset).epoch()}) <= 5
    assert {b[0].shape for b in batches(dataset, bucketed=False).epoch()} == {torch.Size([8, 64])}


def test_what_is_too_long_is_cut(dataset: PairDataset) -> None:
    loader = batches(dataset, length=8, max_tokens=64)
    source, tokens, targets = next(loader)
    assert source.shape[1] == tokens.shape[1] == targets.shape[1] == 8
    assert len(prompt(range(4, 100), encoder_decoder=True, length=16)) == 16
    assert len(prompt(range(4, 100), encoder_decoder=False, length=16)) == 12
    assert prompt([7, 8], encoder_decoder=False, length=16) == [SOURCE_TAG, 7, 8, TARGET_TAG]
    with pytest.raises(InputError, match="max_tokens is 4"):
        batches(dataset, length=8, max_tokens=4)
