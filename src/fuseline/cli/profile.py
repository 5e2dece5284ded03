"""Show where the time of one training step goes: by kind of work and by kernel, each against its floor;
where the GPU waits; what holds the memory; what torch.compile fused. The first line after the times says
what to do next.

The step is that of a preset, a checkpoint, or a model of your own: MODULE:FUNCTION, a function that returns
(model, batch) or (model, batch, loss_fn). --forward profiles its forward pass, --decode a decoding step.

Writes a page, traces for Perfetto, records and profile.json. With --compare it says instead what accounts
for the difference of two profiles."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from fuseline.cli.options import Recorded, Seeded, resolve_device
from fuseline.errors import InputError

if TYPE_CHECKING:
    import torch

    from fuseline.cli.profile_asked import Asked
    from fuseline.profiling import Difference, Profile
    from fuseline.records.record import Scalar

DEFAULT_OUT = Path("fuseline-profile")
LARGE_ON_CPU = 2048  # tokens of a step that takes seconds there
DEFAULT_TARGET = {"cpu": "tiny", "cuda": "gpt2"}


@dataclass(frozen=True)
class Options(Recorded, Seeded):
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")] = "auto"
    """A preset (gpt2, llama3.2-1b, translation-seed, vit, ..), the folder of a run of `fuseline train`, or
    MODULE:FUNCTION; auto: gpt2 on a GPU, else tiny."""
    forward: bool = False
    """The forward pass alone, without gradients."""
    decode: bool = False
    """A decoding step of a GPT or a Llama: one token for each row."""
    batch_size: int | None = None
    """Sequences a step (default: the preset's)."""
    seqlen: int | None = None
    """Tokens a sequence (default: the preset's). With --decode, tokens in the cache (default: 256)."""
    precision: str = "auto"
    """fp32, tf32, bf16, fp16, or fp8 (bf16, but linear layers in fp8 where that is faster); auto: bf16 on a
    GPU that has it, else fp32."""
    execution: str = "eager"
    """eager, inductor, cudagraphs, reduce-overhead, graph, inductor-graph."""
    kernels: str = "fuseline"
    """Whose kernels compute norms and the work fused with them: fuseline or torch."""
    attention: str = "pick"
    """Attention backend of a GPT; pick: the fastest known."""
    loss: str = "auto"
    """Cross-entropy of a GPT: float32, logits, fuseline or fuseline-linear; auto: fuseline-linear, or logits
    with --kernels torch."""
    dropout: float | None = None
    """Dropout of a GPT (default: the preset's)."""
    bias: bool | None = None
    """Biases in linear layers and norms of a GPT (default: the preset's)."""
    vocab_multiple: int = 64
    """Pad a GPT's vocabulary to a multiple of this."""
    steps: int = 5
    """Steps to record, after the profiler has settled."""
    compare: tuple[Path, Path] | None = None
    """Compare two profiles: their folders, the old one first."""


def run(options: Options) -> int:
    # torch says on the first recording that it missed memory taken before it, which is known.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if options.compare is not None:
        return _compare(options, *options.compare)
    if options.steps < 1:
        raise InputError(f"--steps {options.steps}: record 1 or more.")
    if options.forward and options.decode:
        raise InputError("--forward and --decode are two things to profile: give one of them.")
    asked = _asked(options)
    out = options.out or DEFAULT_OUT
    from fuseline.cli.profile_targets import case_of, ready

    if options.dry_run:
        case = case_of(asked)
        if options.json:
            print(json.dumps({"case": case, "out": str(out)}))
        else:
            print(f"{', '.join(f'{name} {value}' for name, value in case.items())}. Would write to {out}.")
        return 0
    profile = _profiled(options, ready(asked))
    from fuseline.report.profile import save

    page = save(profile, out)
    if options.json:
        print(json.dumps({**_as_json(profile), "folder": str(out), "page": str(page)}))
        return 0
    print(profile)
    print(f"\nPage:    {page}\nTraces:  {', '.join(str(out / name) for name in profile.files)}")
    return 0


def _asked(options: Options) -> Asked:
    import torch

    from fuseline.cli.profile_asked import Asked

    device = torch.device(resolve_device(options.device))
    precision = options.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    loss = options.loss
    if loss == "auto":
        loss = "fuseline-linear" if options.kernels == "fuseline" else "logits"
    return Asked(
        target=DEFAULT_TARGET[device.type] if options.target == "auto" else options.target,
        device=device,
        task="forward" if options.forward else "decode" if options.decode else "train",
        batch=options.batch_size,
        seqlen=options.seqlen,
        precision=precision,
        execution=options.execution,
        kernels=options.kernels,
        attention=options.attention,
        loss=loss,
        dropout=options.dropout,
        bias=options.bias,
        vocab_multiple=options.vocab_multiple,
        seed=options.seed,
    )


def _profiled(options: Options, ready: object) -> Profile:
    from rich.console import Console

    from fuseline.cli.profile_targets import Ready
    from fuseline.profiling import profile_step

    assert isinstance(ready, Ready)
    console = Console(stderr=True)
    console.print(f"Profiling {_told(ready.case, ready.device)} ...", highlight=False, soft_wrap=True)

    def tell(what: str) -> None:
        if console.is_terminal:
            status.update(what)
        else:
            console.print(f"  {what} ...", highlight=False)

    try:
        with console.status("building") as status:
            profile = profile_step(
                ready.step,
                ready.device,
                model=ready.model,
                optimizer=ready.optimizer,
                unrecorded=ready.unrecorded,
                name_modules=ready.eager,
                case=ready.case,
                precision=ready.precision,
                steps=options.steps,
                observe=tell,
            )
            return replace(profile, notes=(*profile.notes, *_about_fp8(ready.decided())))
    finally:
        ready.close()


def _about_fp8(decided: Sequence[str]) -> tuple[str, ...]:
    """Which linear layers compute in fp8, and which stay in bf16."""
    return (f"Linear layers, forward and backward: {'; '.join(decided)}.",) if decided else ()


def _told(case: Mapping[str, Scalar], device: torch.device) -> str:
    """What takes a step, and of what size; on a processor how to be done sooner where that is large."""
    name = case.get("preset") or case.get("checkpoint") or case.get("model") or "a model"
    batch, seqlen = case.get("batch"), case.get("seqlen_q")
    if not (isinstance(batch, int) and isinstance(seqlen, int)):
        return f"{name} on {device}"
    sooner = device.type == "cpu" and batch * seqlen > LARGE_ON_CPU
    hint = " (minutes; --batch-size 1 --seqlen 256 is sooner done)" if sooner else ""
    return f"{name}, {batch} x {seqlen} tokens a step, on {device}{hint}"


def _as_json(profile: Profile) -> dict[str, object]:
    memory = profile.memory
    return {
        "case": dict(profile.case),
        "step_ms": asdict(profile.step_ms),
        "busy_ms": profile.busy_ms,
        "waiting_ms": profile.waiting_ms,
        "kinds": [asdict(row) for row in profile.by_kind()],
        "kernels": [asdict(row) for row in profile.by_kernel()],
        "gaps": [asdict(row) for row in profile.gaps_by_place()],
        "memory": None if memory is None else {"peak_bytes": memory.bytes, **memory.by_kind()},
        "fusions": [asdict(fusion) for fusion in profile.fusions],
        "graph_breaks": [asdict(one) for one in profile.graph_breaks],
        "recompilations": [asdict(one) for one in profile.recompilations],
    }


def _compare(options: Options, old: Path, new: Path) -> int:
    from fuseline.profiling import difference, saved

    if options.target != "auto":
        raise InputError(f"--compare reads two profiles and takes none of {options.target!r}: leave it out.")
    found: Difference = difference(saved.read(old), saved.read(new))
    if options.json:
        print(json.dumps(asdict(found)))
    else:
        print(f"From {old} to {new}.")
        print(found)
    sys.stdout.flush()
    return 0
