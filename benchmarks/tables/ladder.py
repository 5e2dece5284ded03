"""The ladder of the GPT-2 training step, and the comparison of `torch.compile`'s backends."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.records import Record
from fuseline.report.sections.rungs import climbs
from tables.markdown import newest, table

RUNGS = {
    "plain PyTorch": "plain PyTorch (fp32, naive attention)",
    "tf32": "TF32",
    "bf16": "bf16",
    "fp16": "fp16 with a scaler",
    "fused-softmax": "Fuseline's softmax in naive attention",
    "efficient": "memory-efficient attention",
    "flash": "flash attention",
    "cudnn": "cuDNN attention",
    "padded-vocabulary": "vocabulary padded to 50,304",
    "16-bit-loss": "log-probabilities in 16 bits",
    "fused-loss": "Fuseline's cross-entropy",
    "linear-loss": "Fuseline's head and loss in chunks",
    "fused-adamw": "fused AdamW",
    "fuseline-kernels": "Fuseline's kernels",
    "torch-kernels": "torch's LayerNorm again, which the compiler fuses",
    "fp32-loss": "torch's loss again, which the compiler fuses",
    "naive": "attention written out again, which the compiler fuses",
    "inductor": "`torch.compile`",
    "reduce-overhead": "`torch.compile`, reduce-overhead",
    "graph": "the whole step in one CUDA graph",
    "inductor-graph": "`torch.compile`, the whole step in one CUDA graph",
}


def ladder(records: Sequence[Record]) -> list[str]:
    """The rungs of the climb on GPT-2 that were kept; over the best that torch does alone where that is on
    record."""
    (climb,) = climbs(
        [r for r in records if (r.case.get("preset"), r.case.get("mode")) == ("gpt2", "cumulative")]
    )
    beside = climb.over_torch is not None
    body = []
    for rung in climb.ran:
        if not rung.kept:
            continue
        over_torch, batch = climb.ratio_over_torch(rung), rung.value("max_batch")
        tried = any(r.case.get("verified") for r in rung.records.values())
        body.append(
            [
                RUNGS.get(rung.name, rung.name),
                f"{rung.interval[0]:.1f}",
                f"{rung.value('tokens_per_s'):,.0f}",
                *([f"{over_torch:.2f}x" if over_torch else ""] if beside else []),
                f"{rung.value('speedup') or 1.0:.2f}x",
                f"{rung.value('peak_memory_gib'):.1f}",
                (f"{batch:.0f}" if tried else f"about {batch:.0f}") if batch else "",
            ]
        )
    over = [*(["over the best of torch alone"] if beside else []), "over plain PyTorch"]
    return table(["rung", "ms a step", "tokens/s", *over, "peak GiB", "largest batch"], body)


MODELS = {
    "shakespeare": "GPT, 10.65 M parameters, batch 64",
    "gpt2": "GPT-2 124M, batch 16",
    "vit": "vision transformer, batch 64",
    "resnet50": "ResNet-50, batch 64",
    "lstm": "LSTM, batch 64",
}
BACKENDS = (
    "eager",
    "cudagraphs",
    "inductor",
    "reduce-overhead",
    "max-autotune-no-cudagraphs",
    "max-autotune",
)


def compiling(records: Sequence[Record]) -> list[str]:
    """Milliseconds of a training step by model and backend, in brackets the seconds that compiling took."""

    def by_model(r: Record) -> tuple[object, ...]:
        return (r.case["model"],)

    times = newest(records, "iteration_ms", by_model)
    seconds = newest(records, "compile_s", by_model)
    measured = [backend for backend in BACKENDS if any(backend in found for found in times.values())]
    body = []
    for model, name in MODELS.items():
        cells = [name]
        for backend in measured:
            time = times.get((model,), {}).get(backend)
            compiled = seconds.get((model,), {}).get(backend)
            cells.append(f"{time:.2f}" + (f" ({compiled:.1f} s)" if compiled else "") if time else "")
        body.append(cells)
    return table(["training step, bf16, ms", *measured], body)
