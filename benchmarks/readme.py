"""Write the tables of README.md anew from the committed records; `--check` says whether they are current.

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fuseline.records import Record, read

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"

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
    "linear-loss": "Fuseline's head and loss by chunks",
    "fused-adamw": "fused AdamW",
    "fuseline-kernels": "Fuseline's kernels",
    "torch-kernels": "torch's LayerNorm again, which the compiler fuses",
    "fp32-loss": "torch's loss again, which the compiler fuses",
    "inductor": "`torch.compile`",
    "reduce-overhead": "`torch.compile`, reduce-overhead",
    "graph": "the whole step in one CUDA graph",
    "inductor-graph": "`torch.compile`, the whole step in one CUDA graph",
}
# Op, direction, name, and the shortest rows worth telling: 8,192 short rows of a loss are over in no time.
OPS = (
    ("softmax", "fw", "softmax forward", 1),
    ("softmax", "bw", "softmax backward", 1),
    ("layer_norm", "fw", "LayerNorm forward", 1),
    ("layer_norm", "bw", "LayerNorm backward", 1),
    ("rms_norm", "fw", "RMSNorm forward", 1),
    ("rms_norm", "bw", "RMSNorm backward", 1),
    ("dropout_add_layer_norm", "fw", "LayerNorm of residual + dropout(x + bias)", 1),
    ("dropout_add_layer_norm", "bw", "its backward", 1),
    ("gelu", "bw", "GELU with bias, backward", 1),
    ("swiglu", "bw", "SwiGLU backward", 1),
    ("embedding", "bw", "embedding backward", 1),
    ("cross_entropy", "fwbw", "cross-entropy and its gradient", 4096),
)
OP_LENGTHS = (128, 768, 1024, 4096, 16384, 65536)
PEERS = ("eager", "inductor", "liger", "quack")


def ladder(records: Sequence[Record]) -> list[str]:
    """The rungs of the climb on GPT-2 that were kept."""
    climb = [r for r in records if r.case.get("preset") == "gpt2" and r.case.get("mode") == "cumulative"]
    kept = {r.case["rung"]: r for r in climb if r.metric == "iteration_ms" and r.case.get("kept")}
    lines = [
        "| rung | ms a step | tokens/s | against plain PyTorch | peak GiB | largest batch |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for rung, time in sorted(kept.items(), key=lambda item: int(str(item[1].case["order"]))):
        told = {r.metric: r.value for r in climb if r.case["rung"] == rung}
        tried = any(r.case.get("verified") for r in climb if r.case["rung"] == rung)
        speedup, batch = told.get("speedup"), told.get("max_batch")
        cells = [
            RUNGS[str(rung)],
            f"{time.value:.1f}",
            f"{told['tokens_per_s']:,.0f}",
            f"{speedup:.2f}x" if speedup else "1.00x",
            f"{told['peak_memory_gib']:.1f}",
            (f"{batch:.0f}" if tried else f"about {batch:.0f}") if batch else "",
        ]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return lines


def ops(records: Sequence[Record]) -> list[str]:
    """Share of the copy bandwidth in bf16: ours, and the best of the peers."""
    lines = [
        f"| bf16 | {' | '.join(f'{n:,}' for n in OP_LENGTHS)} |",
        f"|---|{'---:|' * len(OP_LENGTHS)}",
    ]
    for op, direction, name, shortest in OPS:
        cells = [_share(records, op, direction, n) if n >= shortest else "" for n in OP_LENGTHS]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _share(records: Iterable[Record], op: str, direction: str, n: int) -> str:
    wanted = {"op": op, "direction": direction, "n": n, "dtype": "bfloat16", "captured": False}
    found: dict[str, float] = {}
    for r in sorted(records, key=lambda r: r.time):  # the newest run of each
        if r.metric == "share_of_copy" and r.value is not None and wanted.items() <= r.case.items():
            found[r.peer] = r.value
    peers = {peer: found[peer] for peer in PEERS if peer in found}
    if "fuseline" not in found or not peers:
        return ""
    best = max(peers, key=lambda peer: peers[peer])
    return f"**{found['fuseline']:.2f}** ({best} {peers[best]:.2f})"


EXECUTIONS = {
    "eager": "eager",
    "graph": "one CUDA graph a step",
    "inductor-graph": "`torch.compile`, one CUDA graph",
}
KERNELS = ("formulas", "torch", "fuseline", "nothing")


def translation(records: Sequence[Record]) -> list[str]:
    """Milliseconds a step of the seed's translation model by kernels, and the ratio of ours to the first;
    what would be left were nothing to fuse is in brackets where the compiler would remove it: by the kernels'
    times, else that of the uncompiled graph."""
    told = {
        (r.case["execution"], r.case["dtype"], r.case["kernels"], r.metric): r.value
        for r in records
        if r.case.get("section") == "epoch"
    }
    limits = {
        (r.case["execution"], r.case["dtype"]): r.value
        for r in records
        if r.case.get("section") == "work" and r.metric == "amdahl_limit"
    }
    lines = [
        "| step | operator by operator | torch's kernels | Fuseline's ops | nothing left to fuse | faster |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for execution, dtype in dict.fromkeys(key[:2] for key in told):
        times = [told.get((execution, dtype, kernels, "iteration_ms")) for kernels in KERNELS]
        cells = [f"{EXECUTIONS[str(execution)]}, {dtype}", *(f"{t:.2f} ms" if t else "" for t in times)]
        if times[0] and not times[-1]:
            limit, graph = (
                limits.get((execution, dtype)),
                told.get(("graph", dtype, "nothing", "iteration_ms")),
            )
            left = times[0] / limit if limit else graph
            cells[-1] = f"({left:.2f} ms)" if left else ""
        cells.append(f"{told[execution, dtype, 'fuseline', 'paired_speedup']:.2f}x")
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return lines


def gemv(records: Sequence[Record]) -> list[str]:
    """Microseconds of one row times a square weight: ours, and the best of the peers."""
    told: dict[tuple[int, str], dict[str, float]] = {}
    for r in sorted(records, key=lambda r: r.time):
        if r.case.get("section") == "chart" and r.metric == "time_us" and r.value is not None:
            told.setdefault((int(str(r.case["k"])), str(r.case["format"])), {})[r.peer] = r.value
    sizes = sorted({size for size, _ in told})
    lines = [f"| K = N | {' | '.join(f'{n:,}' for n in sizes)} |", f"|---|{'---:|' * len(sizes)}"]
    for format in ("int8", "int4", "bf16"):
        cells = [_fastest(told.get((size, format), {})) for size in sizes]
        lines.append(f"| {format} | {' | '.join(cells)} |")
    return lines


def _fastest(times: dict[str, float]) -> str:
    peers = {peer: time for peer, time in times.items() if peer != "fuseline"}
    beside = ""
    if peers:
        best = min(peers, key=lambda peer: peers[peer])
        beside = f" ({best} {peers[best]:.1f})"
    return f"**{times['fuseline']:.1f}**{beside}" if "fuseline" in times else ""


LEVERS = {
    "eager": "eager",
    "compiled": "`torch.compile`, static cache",
    "cuda-graph": "one CUDA graph a step",
    "fused": "Fuseline's kernels",
    "int8": "int8 weights",
    "int4": "int4 weights, groups of 128",
    "speculation": "an int4 copy drafts 4 tokens ahead of bf16",
}


def climb(records: Sequence[Record]) -> list[str]:
    """Generation rung by rung: of Llama-2-7B's shape, and of the newest trained model with its perplexity."""
    told: dict[str, dict[str, dict[str, float]]] = {}
    for r in sorted(records, key=lambda r: r.time):
        if "rung" in r.case and r.value is not None:
            rungs = told.setdefault(str(r.case["preset"]), {})
            rungs.setdefault(str(r.case["rung"]), {})[r.metric] = r.value
    large = told.get("llama2-7b", {})
    trained = [rungs for rungs in told.values() if any("perplexity" in found for found in rungs.values())]
    small = trained[-1] if trained else {}
    lines = [
        "| rung | Llama-2-7B, tokens/s | against eager "
        "| a small trained GPT, tokens/s | against eager | perplexity |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for rung, name in LEVERS.items():
        cells = [name]
        for found in (large.get(rung, {}), small.get(rung, {})):
            cells.append(f"{found['tokens_per_s']:,.0f}" if "tokens_per_s" in found else "")
            cells.append(f"{found['speedup']:.2f}x" if "speedup" in found else "")
        perplexity = small.get(rung, {}).get("perplexity")
        cells.append(f"{perplexity:.3f}" if perplexity else "")
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return lines


def decode(records: Sequence[Record]) -> list[str]:
    """Tokens a second around position 200 of 512, by model, format and rows, and the best of others."""
    told: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for r in sorted(records, key=lambda r: r.time):
        place = r.metric, r.case.get("position"), r.case.get("seqlen_k")
        if "rung" in r.case or place != ("tokens_per_s", 200, 512) or r.value is None:
            continue
        key = str(r.case["preset"]), str(r.case["format"])
        told.setdefault(key, {}).setdefault(int(str(r.case["batch"])), {})[r.peer] = r.value
    lines = [
        "| model | weights | 1 row, tokens/s | best of the others | 8 rows, tokens/s | best of the others |",
        "|---|---|---:|---:|---:|---:|",
    ]
    formats = ("bf16", "int8", "int4", "fp8")
    for key, rates in sorted(told.items(), key=lambda at: (at[0][0] == "gpt2", formats.index(at[0][1]))):
        cells = [*key]
        for rows in (1, 8):
            others = dict(rates.get(rows, {}))
            ours = others.pop("fuseline", None)
            best = max(others, key=lambda peer: others[peer], default="")
            cells.append("" if ours is None else f"{ours:,.0f}")
            cells.append(f"{others[best]:,.0f} ({DECODERS.get(best, best)})" if best else "")
        if cells[2] or cells[4]:
            lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return lines


DECODERS = {"gptfast": "gpt-fast's way"}


ROUNDINGS = {"nearest": "", "fitted": ", fitted grids", "hqq": ", HQQ", "calibrated": ", calibrated"}


def quality(records: Sequence[Record]) -> list[str]:
    """What each format costs in perplexity, by the text that a model was trained and measured on."""
    told: dict[tuple[str, ...], dict[str, float]] = {}
    for r in sorted(records, key=lambda r: r.time):
        if r.case.get("section") != "formats" or r.value is None:
            continue
        of = str(r.case["data"]) if r.case["text"] == "held out" else Path(str(r.case["text"])).stem
        size = f", groups of {r.case['group_size']}" if r.case["group_size"] else ""
        zeros = ", zero points" if r.case.get("zero_points") else ""
        rounding = ROUNDINGS[str(r.case["rounding"])]
        told.setdefault((of, f"{r.case['format']}{size}{zeros}{rounding}"), {})[r.metric] = r.value
    lines = ["| text | weights | perplexity | more than bf16 |", "|---|---|---:|---:|"]
    for (of, format), found in told.items():
        percent = round(100 * found.get("loss_error", 0.0), 3) + 0.0  # -0 is 0
        cost = f"{percent:.3f}%" if "loss_error" in found else ""
        lines.append(f"| {of} | {format} | {found['perplexity']:.3f} | {cost} |".replace("|  |", "| |"))
    return lines


TABLES: dict[str, tuple[str, Callable[[Sequence[Record]], list[str]]]] = {
    "ladder": ("ladder", ladder),
    "ops": ("ops", ops),
    "gemv": ("linear", gemv),
    "decode": ("decode", decode),
    "climb": ("decode", climb),
    "quality": ("quality", quality),
    "translation": ("translation", translation),
}


def rewritten(text: str) -> str:
    """README's text with every table drawn from the records."""
    for name, (suite, draw) in TABLES.items():
        table = "\n".join(draw(read(*sorted(RESULTS.glob(f"{suite}-*h100*.jsonl")))))
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.DOTALL)
        text, count = pattern.subn(lambda m, table=table: m[1] + table + m[2], text)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"README.md has {count} places for the table {name!r}, not one")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if it would")
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    new = rewritten(text)
    if options.check:
        return int(new != text)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
