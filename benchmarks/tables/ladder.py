"""The ladder of the GPT-2 training step, and the comparison of `torch.compile`'s backends."""

from __future__ import annotations

from collections.abc import Sequence

from fuseline.bench.ladder.torch_alone import TORCH_ALONE
from fuseline.records import Record
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
    climb = [r for r in records if r.case.get("preset") == "gpt2" and r.case.get("mode") == "cumulative"]
    alone = _torch_alone(climb)
    kept = {r.case["rung"]: r for r in climb if r.metric == "iteration_ms" and r.case.get("kept")}
    body = []
    for rung, time in sorted(kept.items(), key=lambda item: int(str(item[1].case["order"]))):
        of_rung = [r for r in climb if r.case["rung"] == rung]
        values = {r.metric: r.value for r in of_rung}
        speedup, batch = values.get("speedup") or 1.0, values.get("max_batch")
        tried = any(r.case.get("verified") for r in of_rung)
        body.append(
            [
                RUNGS.get(str(rung), str(rung)),
                f"{time.value:.1f}",
                f"{values['tokens_per_s']:,.0f}",
                *([f"{speedup / alone:.2f}x"] if alone else []),
                f"{speedup:.2f}x",
                f"{values['peak_memory_gib']:.1f}",
                (f"{batch:.0f}" if tried else f"about {batch:.0f}") if batch else "",
            ]
        )
    over = [*(["over the best of torch alone"] if alone else []), "over plain PyTorch"]
    return table(["rung", "ms a step", "tokens/s", *over, "peak GiB", "largest batch"], body)


def _torch_alone(climb: Sequence[Record]) -> float | None:
    """How much faster than plain PyTorch the best is that torch does alone: of its modes the one that is
    least behind where the climb ended."""
    modes: dict[str, dict[str, float]] = {}
    for r in sorted(climb, key=lambda r: r.time):
        if r.case.get("slot") == TORCH_ALONE and r.value:
            modes.setdefault(str(r.case["rung"]), {})[r.metric] = r.value
    timed = [figures for figures in modes.values() if "paired_speedup" in figures and "speedup" in figures]
    return max(timed, key=lambda figures: figures["paired_speedup"])["speedup"] if timed else None


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
