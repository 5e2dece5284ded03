"""Made-up records in the shape of real ones: the figures are invented, and the machine's name says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fuseline.records import Environment, Record

GPU = Environment(
    device="NVIDIA H100 80GB HBM3 (invented test data)",
    clocks="1755/2619 MHz",
    power_w=612.0,
    torch="2.11.0+cu130",
    cuda="13.0",
    fuseline="0.1.0",
    commit="0123456789ab",
)
CPU = replace(
    GPU,
    device="Imaginary CPU (2 threads, invented test data)",
    clocks=None,
    power_w=None,
    cuda=None,
    torch="2.13.0+cpu",
)

# name | slot | lever | change | ms, GiB, largest batch, loss error, gradient error, compile s, kept
CLIMB = """
plain PyTorch    |baseline  |none          |                         |412.3 33.4 37 0 0 - kept
fp32             |precision |none          |                         |- - - - - - dropped
tf32             |precision |tensor cores  |dtype=tf32               |231.6 33.4 37 3.1e-06 0.00041 - kept
bf16             |precision |tensor cores  |dtype=bf16               |160.4 29.6 42 0.00021 0.0079 - kept
fp16             |precision |tensor cores  |dtype=fp16               |161.9 29.8 42 3.2e-05 0.0012 - dropped
fused-softmax    |attention |custom kernels|backend=naive_fused      |118.2 24.1 52 0.0002 0.0078 - kept
math             |attention |fuse          |backend=math             |153.1 25.9 48 0.00023 0.0083 - dropped
efficient        |attention |fuse          |backend=efficient        |79.3 16 80 0.0002 0.0077 - kept
flash            |attention |fuse          |backend=flash            |73 16 80 0.0002 0.0077 - kept
cudnn            |attention |fuse          |backend=cudnn            |71.6 16.1 80 0.00021 0.0077 - kept
padded-vocabulary|vocabulary|tensor cores  |vocab=50304              |46 16.1 80 0.00021 0.0077 - kept
fused-adamw      |optimizer |fuse          |optimizer=fused          |43.2 16.1 80 0.00021 0.0077 - kept
fuseline-kernels |kernels   |custom kernels|kernels=fuseline         |40.9 15.2 84 0.00017 0.0071 - kept
cudagraphs       |execution |overhead      |execution=cudagraphs     |40.1 15.9 80 0.00017 0.0071 8.4 kept
inductor         |execution |fuse          |execution=inductor       |36.8 11.5 112 0.00015 0.0066 41.2 kept
reduce-overhead  |execution |overhead      |execution=reduce-overhead|36.3 12.9 100 0.00015 0.0066 44 kept
graph            |execution |overhead      |execution=graph          |39.4 15.4 82 0.00017 0.0071 - dropped
inductor-graph   |execution |overhead      |execution=inductor-graph |34.9 12.6 103 0.00015 0.0066 43.1 kept
"""

ANCHORED = {
    "eager naive 50257": 159.8,
    "eager math 50257": 153.9,
    "eager efficient 50257": 79.1,
    "eager flash 50257": 72.7,
    "eager flash 50304": 47.1,
    "eager cudnn 50304": 46.3,
    "inductor naive 50257": 60.4,
    "inductor flash 50257": 40.2,
    "inductor default 50304": 34.0,
    "inductor reduce-overhead 50304": 36.0,
}


def _record(
    suite: str, case: Mapping[str, Any], metric: str, value: float | None, env: Environment = GPU, **rest: Any
) -> Record:
    made = Record.of(suite, case, metric, value, env, **rest)
    return replace(made, time="2026-11-20T10:02:00+00:00")


def _around(value: float, share: float = 0.002) -> dict[str, float]:
    return {"low": value * (1 - share), "high": value * (1 + 1.4 * share)}


def _rung(case: dict[str, Any], ms: float, env: Environment, *, tokens: int, gpu: bool) -> list[Record]:
    rate = tokens / ms * 1e3
    made = [
        _record("ladder", case, "iteration_ms", ms, env, n=5, **_around(ms)),
        _record("ladder", case, "tokens_per_s", rate, env, n=5, **_around(rate)),
        _record("ladder", case, "data_wait_share", 0.0004, env, n=5),
    ]
    if gpu:
        made.append(_record("ladder", case, "mfu", 14.1 / ms, env, n=5, **_around(14.1 / ms)))
        made.append(_record("ladder", case, "mfu_causal", 12.9 / ms, env, n=5, **_around(12.9 / ms)))
    return made


def make_ladder(
    env: Environment = GPU, preset: str = "gpt2", *, gpu: bool = True, scale: float = 1.0
) -> list[Record]:
    """A cumulative climb, some rungs alone, the seeds' set and the anchors."""
    state: dict[str, Any] = {
        "model": "gpt", "preset": preset, "batch": 16, "seqlen_q": 1024, "dtype": "fp32", "backend": "naive",
        "vocab": 50257, "vocab_size": 50257, "vocab_multiple": 1, "optimizer": "unfused", "kernels": "torch",
        "execution": "eager", "dropout": 0.0, "bias": False,
    }  # fmt: skip
    records: list[Record] = []
    first: float | None = None
    best: tuple[str, float] | None = None
    for order, line in enumerate(CLIMB.strip().splitlines()):
        name, slot, lever, changes, figures = (part.strip() for part in line.split("|"))
        *cells, word = figures.split()
        key, _, value = changes.partition("=")
        change: dict[str, Any] = {key: int(value) if value.isdigit() else value} if key else {}
        ms, gib, batch, loss, grad, compile_s = (None if c == "-" else float(c) for c in cells)
        kept = word == "kept"
        case = {
            **state, **change, "mode": "cumulative", "rung": name, "slot": slot, "lever": lever,
            "order": order, "kept": kept, "baseline": best and best[0],
        }  # fmt: skip
        captured = change.get("execution") in ("cudagraphs", "reduce-overhead", "graph", "inductor-graph")
        if ms is None or (not gpu and (captured or change.get("dtype"))):
            reason = (
                "nothing to change: plain PyTorch has it already" if ms is None else "needs a CUDA device"
            )
            records.append(_record("ladder", {**case, "kept": False, "reason": reason}, "skipped", None, env))
            continue
        ms *= scale
        first = first or ms
        records += _rung(case, ms, env, tokens=16 * 1024, gpu=gpu)
        records.append(_record("ladder", case, "loss_error", loss, env))
        records.append(_record("ladder", case, "grad_error", grad, env))
        if gpu:
            records.append(_record("ladder", case, "peak_memory_gib", gib, env))
            records.append(_record("ladder", case, "max_batch", batch, env, n=2))
            records[-1] = replace(records[-1], case={**case, "verified": kept})
            names = (
                "3.21 ms x12 flash_bwd_kernel<64, 128>; 1.94 ms x48 gemm_bf16_128x256; 0.4 ms x25 layer_norm"
            )
            records.append(_record("ladder", {**case, "names": names}, "kernels", None, env))
        if compile_s is not None:
            records.append(_record("ladder", case, "compile_s", compile_s, env))
        if best is not None:
            gain = best[1] / ms
            records.append(
                _record("ladder", case, "speedup", first / ms, env, n=5, **_around(first / ms, 0.004))
            )
            records.append(_record("ladder", case, "paired_speedup", gain, env, n=8, **_around(gain, 0.003)))
        if kept:
            best, state = (name, ms), {**state, **change}
    if gpu:
        records += _named_sets(state, preset, env)
    return records


def _named_sets(state: dict[str, Any], preset: str, env: Environment) -> list[Record]:
    records = []
    seeds = {"naive": 62.1, "math": 58.4, "efficient": 43.0, "flash": 40.0, "flash padded": 37.0}
    for mode, combination, rows in (("combination", "seed-001", seeds), ("anchor", "anchors", ANCHORED)):
        for order, (name, ms) in enumerate(rows.items(), 40):
            lever = "none" if "naive" in name else "overhead" if "reduce" in name else "fuse"
            case = {
                **state, "mode": mode, "combination": combination, "rung": name, "slot": "combination",
                "lever": lever, "order": order, "kept": True, "baseline": None,
            }  # fmt: skip
            records += _rung(case, ms, env, tokens=16 * 1024, gpu=True)
    return records


def make_extras(env: Environment = GPU) -> list[Record]:
    """The head's products, numeric stability, a loss curve and a sample."""
    records = []
    for vocab, factor in ((50257, 2.7), (50304, 1.0)):
        for product, us in (("logits", 1730.0), ("grad_x", 1810.0), ("grad_weight", 1790.0)):
            case = {
                "section": "head_gemm",
                "product": product,
                "dtype": "bfloat16",
                "rows": 16384,
                "vocab": vocab,
            }
            time_us = us * factor
            records.append(_record("ladder", case, "time_us", time_us, env, n=30, **_around(time_us)))
            records.append(_record("ladder", case, "tflops", 1.266e6 / time_us, env, n=30))
    for dtype, error in (("fp32", 1.1e-7), ("bf16", 2.4e-3), ("fp16", 3.0e-4)):
        for variant, factor in (
            ("scale_after", 1.6),
            ("scale_before", 1.0),
            ("fused_softmax", 0.8),
            ("sdpa", 0.9),
        ):
            for magnitude in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0):
                overflow = dtype == "fp16" and magnitude > (16 if variant == "scale_after" else 32)
                case = {
                    "section": "stability", "variant": variant, "dtype": dtype, "magnitude": magnitude,
                    "head_dim": 64, "overflow": overflow, "allclose_sdpa": variant != "scale_after",
                }  # fmt: skip
                value = None if overflow else error * factor * (1 + 0.2 * math.log2(magnitude) ** 2)
                records.append(_record("ladder", case, "error", value, env))
    rng = np.random.default_rng(0)
    for step in range(0, 900, 3):
        loss = 1.4 + 9.4 * math.exp(-step / 130) + 0.08 * float(rng.standard_normal())
        records.append(_record("ladder", {"section": "curve", "step": step}, "loss", loss, env))
        if step % 150 == 0:
            case = {"section": "curve", "step": step}
            records.append(_record("ladder", case, "validation_loss", loss + 0.05, env))
    sample = {"section": "sample", "step": 900, "text": "def add(first, second):\n    return <b>first</b>\n"}
    return [*records, _record("ladder", sample, "validation_loss", 1.47, env)]


MODELS = {"shakespeare": 7.9, "gpt2": 47.5, "vit": 61.0, "resnet50": 88.0, "lstm": 9.3}
BACKENDS = {"eager": 1.0, "cudagraphs": 0.92, "inductor": 0.71, "reduce-overhead": 0.66}


def make_compile(env: Environment = GPU) -> list[Record]:
    """Five models by four back ends, one of them skipped, and the geometric means."""
    records = []
    for model, eager_ms in MODELS.items():
        for backend, factor in BACKENDS.items():
            per = "image" if model in ("vit", "resnet50") else "token"
            case: dict[str, Any] = {
                "model": model, "preset": "full", "batch": 64, "dtype": "bf16", "per": per, "rung": backend,
            }  # fmt: skip
            if per == "token":
                case["seqlen_q"] = 256
            if (model, backend) == ("lstm", "cudagraphs"):
                told = {**case, "reason": "failed with RuntimeError: cuDNN's LSTM cannot be captured here"}
                records.append(_record("compile", told, "skipped", None, env, peer=backend))
                continue
            ms = eager_ms * factor
            figures: dict[str, tuple[float, dict[str, float]]] = {
                "iteration_ms": (ms, _around(ms)),
                "iteration_mean_ms": (ms * 1.01, _around(ms * 1.01)),
                "iteration_sigma_ms": (ms * 0.04, {}),
                "mfu": (0.23 / factor, _around(0.23 / factor)),
                "mfu_sigma": (0.009, {}),
                "data_wait_share": (0.0021, {}),
                "peak_memory_gib": (9.4 * factor, {}),
            }
            if backend != "eager":
                figures |= {
                    "compile_s": (31.0 * factor, {}),
                    "paired_speedup": (1 / factor, _around(1 / factor)),
                    "loss_error": (1.3e-6, {}),
                }
            for metric, (value, interval) in figures.items():
                records.append(_record("compile", case, metric, value, env, peer=backend, n=1000, **interval))
            priced = {**case, "price_per_hour": 2.5}
            cost = 2.5 * ms / 3.6e6 / 16384 * 1e6
            records.append(
                _record("compile", priced, "cost_per_million_tokens", cost, env, peer=backend, n=1000)
            )
    for backend, factor in list(BACKENDS.items())[1:]:
        case = {"model": "geometric mean", "preset": "full", "dtype": "bf16", "rung": backend}
        records.append(
            _record(
                "compile", case, "paired_speedup", 1 / factor, env, peer=backend, n=5, **_around(1 / factor)
            )
        )
    return records


def make_traces(iterations: int = 1000) -> dict[str, list[float]]:
    """Times by `<model>-<backend>`, with noise and a few spikes."""
    rng = np.random.default_rng(1)
    traces = {}
    for model, eager_ms in MODELS.items():
        for backend, factor in BACKENDS.items():
            times = eager_ms * factor * (1 + 0.02 * rng.standard_exponential(iterations))
            times[:: max(1, iterations // 4)] *= 2.5
            traces[f"{model}-{backend}"] = [round(float(t), 4) for t in times]
    return traces


def make_ops(env: Environment = GPU) -> list[Record]:
    """softmax and layer_norm, both directions, three dtypes, three peers."""
    records = []
    peers = {"fuseline": (0.96, "0.1.0"), "eager": (0.55, None), "inductor": (0.84, None)}
    for op in ("softmax", "layer_norm"):
        for dtype, size, error in (("fp32", 4, 4e-8), ("fp16", 2, 2e-4), ("bf16", 2, 1.6e-3)):
            for direction, passes in (("fw", 2), ("bw", 3)):
                for n in (128, 512, 2048, 8192, 32768, 131072):
                    rows = 2**26 // n
                    case = {
                        "op": op,
                        "dtype": dtype,
                        "rows": rows,
                        "n": n,
                        "direction": direction,
                        "captured": False,
                    }
                    for peer, (share, version) in peers.items():
                        drop = 0.02 * max(0.0, math.log2(n) - 13) * (1 if peer == "fuseline" else 3)
                        reached = share - drop - (0.05 if direction == "bw" else 0.0)
                        us = passes * size * 2**26 / (3005e3 * reached)
                        rest = {"peer": peer, "peer_version": version, "n": 50}
                        records += [
                            _record("ops", case, "time_us", us, env, **rest, **_around(us)),
                            _record("ops", case, "bandwidth_gbs", 3005 * reached, env, **rest),
                            _record("ops", case, "share_of_copy", reached, env, **rest, **_around(reached)),
                            _record("ops", case, "error", error * (1 + share), env, **rest),
                        ]
                        if peer != "fuseline":
                            gain = peers["fuseline"][0] / reached
                            records.append(
                                _record("ops", case, "paired_speedup", gain, env, **rest, **_around(gain))
                            )
            host = {
                "op": op,
                "dtype": dtype,
                "native": True,
                "direction": "fw",
                "captured": False,
                "rows": 8,
                "n": 128,
            }
            for peer, us in (("fuseline", 9.1), ("eager", 11.6), ("inductor", 38.0)):
                records.append(_record("ops", host, "host_us", us, env, peer=peer, n=10, **_around(us)))
    absent = {"op": "all", "reason": "not installed: `pip install quack-kernels`"}
    records.append(_record("ops", absent, "skipped", None, env, peer="quack"))
    records.append(_record("ops", {"op": "copy"}, "bandwidth_gbs", 3005.0, env, peer="copy"))
    return records


def make_foreign(env: Environment = GPU) -> list[Record]:
    """Suites and metrics that the report has no section for."""
    decode = {"model": "gpt", "preset": "gpt2", "batch": 1, "position": 200}
    made = [
        _record("decode", {**decode, "format": f}, "tokens_per_s", v, env, n=7)
        for f, v in (("bf16", 812.0), ("int8", 1204.0))
    ]
    unheard = replace(made[0], suite="tomorrow", metric="smoothness_of_ride", unit="bumps", value=0.125)
    return [*made, unheard]


@pytest.fixture(scope="session")
def ladder_records() -> list[Record]:
    return make_ladder()


@pytest.fixture(scope="session")
def all_records() -> list[Record]:
    return [*make_ladder(), *make_extras(), *make_compile(), *make_ops(), *make_foreign()]


@pytest.fixture(scope="session", name="make_ladder")
def ladder_maker() -> Callable[..., list[Record]]:
    return make_ladder


@pytest.fixture(scope="session")
def cpu() -> Environment:
    return CPU


@pytest.fixture(scope="session", name="make_traces")
def trace_maker() -> Callable[..., dict[str, list[float]]]:
    return make_traces
