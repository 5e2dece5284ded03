"""Damaged and hostile files: every verb that reads one refuses it in a line, or does its work.

A case copies files that are whole, damages one, and runs a verb on them in a process of its own.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from apart import apart
from damage import damage
from suite import Suite

Trial = dict[str, Any]
PATIENCE_S = 60.0
CPU_S = 20.0  # a whole one takes a second or two; a busy machine does not count here
LONGEST = 1500  # characters of a complaint
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WRITE = ("--prompt-ids", "1,2", "--max-new-tokens", "2", "--device", "cpu")


@dataclass(frozen=True)
class Kind:
    """A folder of whole files, which of them are damaged, and the verb that reads them."""

    files: tuple[str, ...]
    verb: Callable[[Path], Sequence[str]]


KINDS: dict[str, Kind] = {
    "llama": Kind(
        ("config.json", "generation_config.json", "model.safetensors"),
        lambda f: ("generate", "--model", str(f), *WRITE),
    ),
    "text": Kind(
        ("tokenizer.json", "config.json"),
        lambda f: ("generate", "--model", str(f), "--prompt", "hello", *WRITE[2:]),
    ),
    "shards": Kind(
        ("model.safetensors.index.json", "model-1.safetensors", "config.json"),
        lambda f: ("generate", "--model", str(f), *WRITE),
    ),
    "gpt2": Kind(("config.json", "model.safetensors"), lambda f: ("generate", "--model", str(f), *WRITE)),
    "nanogpt": Kind(("ckpt.pt",), lambda f: ("generate", "--checkpoint", str(f / "ckpt.pt"), *WRITE)),
    "quantized": Kind(("quantized.safetensors",), lambda f: ("generate", "--model", str(f), *WRITE)),
    "run": Kind(("best.pt",), lambda f: ("generate", "--checkpoint", str(f), *WRITE)),
    "resume": Kind(
        ("latest.pt", "latest.pt", "metrics.jsonl"),
        lambda f: ("train", "gpt", "--out", str(f), "--resume", "--steps", "5", "--device", "cpu"),
    ),
    "records": Kind(("records.jsonl",), lambda f: _report(f)),
    "traces": Kind(("traces/a-eager.json",), lambda f: _report(f)),
    "pairs": Kind(
        ("a.de", "a.en"),
        lambda f: ("train", "translate", "--data", f"{f / 'a.de'},{f / 'a.en'}", "--dry-run"),
    ),
}


def _report(folder: Path) -> Sequence[str]:
    return ("report", str(folder / "records.jsonl"), "--out", str(folder / "page"))


RARE = ("records", "traces", "resume")  # slower than the others


def prepare(device: str = "cpu") -> None:
    """Make the whole files, once a process."""
    whole()


def draw(pick: random.Random, device: str = "cpu") -> Trial:
    common = [kind for kind in KINDS if kind not in RARE]
    kind = pick.choice((*common, *common, *RARE))
    return {"kind": kind, "file": pick.choice(KINDS[kind].files), "seed": pick.randrange(2**32)}


def check(trial: Trial) -> str | None:
    """What is wrong with how a verb took a damaged file; None if nothing is."""
    from fuseline.cli.main import run as fuseline

    kind, pick = KINDS[trial["kind"]], random.Random(trial["seed"])
    with tempfile.TemporaryDirectory(prefix="fuseline-fuzz-") as room:
        folder = Path(room) / "whole"
        shutil.copytree(whole() / _origin(trial["kind"]), folder)
        way = damage(folder / trial["file"], pick)
        ended = apart(lambda: fuseline(list(kind.verb(folder))), Path(room), patience_s=PATIENCE_S)
        if ended.crashed is not None:
            return f"{way}: {ended.crashed}"
        if (folder / "trapped").exists():
            return f"{way}: code of the file was executed"
        if ended.cpu_s > CPU_S:
            return f"{way}: took {ended.cpu_s:.0f} s"
        if (Path(room) / "outside").exists() or [*folder.rglob(".*.partial"), *folder.rglob(".report-*")]:
            return f"{way}: left something behind"
        page = folder / "page" / "index.html"
        if page.is_file() and ("<img" in page.read_text() or "onerror=alert(1)>" in page.read_text()):
            return f"{way}: a record's text became part of the page"
        return None if ended.code == 0 else _complaint(way, ended.code, ended.error)


def _complaint(way: str, code: int, error: str) -> str | None:
    if code != 2:
        return f"{way}: exit code {code}: {error[-300:]}"
    last = error.rstrip("\n").rpartition("\n")[2]
    if not last.startswith("fuseline: ") or last.endswith(" ..."):
        return f"{way}: refused in more than a line: {error[-300:]!r}"
    if len(last) > LONGEST:
        return f"{way}: a complaint of {len(last)} characters: {last[:200]}"
    if "weights_only" in error:
        return f"{way}: torch's advice came through"
    return None


def _origin(kind: str) -> str:
    return {"text": "llama", "resume": "run", "traces": "records"}.get(kind, kind)


@functools.cache
def whole() -> Path:
    """A folder of each origin."""
    from fuseline.data.tokenizers import ByteBPETokenizer
    from fuseline.generation.footprint import available
    from fuseline.models.gpt import GPT
    from fuseline.models.gpt_checkpoints import save_nanogpt
    from fuseline.models.gpt_config import GPTConfig
    from fuseline.models.gpt_hugging_face import save_hugging_face
    from fuseline.models.llama import Llama, preset
    from fuseline.models.llama_hugging_face import save_llama

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    assert available(torch.device("cpu")) > 0
    place = Path(tempfile.mkdtemp(prefix="fuseline-whole-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    torch.manual_seed(0)
    llama = Llama(preset("llama-tiny"))
    save_llama(llama, place / "llama")
    (place / "llama" / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    ByteBPETokenizer.train(["a b c hello world " * 20], 300).save(place / "llama" / "tokenizer.json")
    _shard(place / "llama", place / "shards")
    gpt = GPT(GPTConfig(block_size=16, vocab_size=300, num_layers=2, num_heads=2, embed_dim=32))
    save_hugging_face(gpt, place / "gpt2")
    (place / "nanogpt").mkdir()
    save_nanogpt(gpt, place / "nanogpt" / "ckpt.pt")
    _quantize(place / "llama", place / "quantized")
    _train(place)
    _record(place / "records")
    (place / "pairs").mkdir()
    for name, word in (("a.de", "ein Satz"), ("a.en", "a sentence")):
        (place / "pairs" / name).write_text("".join(f"{word} {i}\n" for i in range(200)))
    return place


def _shard(origin: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    weights = load_file(origin / "model.safetensors")
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(origin / "config.json", folder)


def _quantize(origin: Path, folder: Path) -> None:
    from fuseline.training import text_generator

    wanted = text_generator.Wanted(1, 2, 4)
    generator = text_generator.load(
        origin, None, device=torch.device("cpu"), dtype=torch.float32, wanted=wanted, quant="int8"
    )
    text_generator.save(generator, folder, origin / "tokenizer.json")


def _train(place: Path) -> None:
    """A run of three steps, on a text that all cases read tokenized."""
    from fuseline.training.config import TrainConfig
    from fuseline.training.train import train

    os.environ["FUSELINE_FUZZ_DATA"] = str(place / "text.txt")
    (place / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    config = TrainConfig(
        data=str(place / "text.txt"),
        tokenizer="char",
        num_layers=1,
        num_heads=2,
        embed_dim=16,
        block_size=16,
        batch_size=2,
        steps=3,
        eval_batches=1,
        sample_interval=0,
        precision="fp32",
        execution="eager",
    )
    train(config, folder=place / "run")


def _record(folder: Path) -> None:
    """Committed records of every suite, one of each section, metric and peer; and a trace."""
    from fuseline.records import read

    (folder / "traces").mkdir(parents=True)
    seen: dict[tuple[Any, ...], int] = {}
    kept = []
    for file in sorted(RESULTS.glob("*.jsonl*")):
        for record in read(file):
            key = record.suite, record.case.get("section"), record.metric, record.peer
            seen[key] = seen.get(key, 0) + 1
            if seen[key] == 1 and len(kept) < 400:
                kept.append(record.to_json())
    (folder / "records.jsonl").write_text("\n".join(kept) + "\n")
    (folder / "traces" / "a-eager.json").write_text(json.dumps([1.0, 2.0, 1.5] * 20))


SUITE = Suite(
    "files",
    "damaged and hostile files of every kind that is read: one line, exit code 2, no crash",
    draw,
    check,
    prepare=prepare,
)
