"""What a line of a file of records may say: the type and range of each field, and of each well-known key of a
case; and the keys that a page cannot do without.

A page is drawn from records that others may have written, so nothing in them is taken on trust.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, Optional

from pydantic import AfterValidator, Field
from typing_extensions import TypedDict

from fuseline.errors import InputError
from fuseline.files.schema import checked_json, checked_values, shown

LINE_BYTES = 2**20
_LONGEST_TEXT = 20_000
_WHOLE = 2**53  # whole numbers that a double holds

# A name is one line without control characters.
Name = Annotated[str, Field(min_length=1, max_length=200, pattern="^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]
Unit = Annotated[str, Field(max_length=200, pattern="^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]
Value = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=_WHOLE)]
Amount = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
Instant = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d:\d\d)?$")]


def _flat(value: Any) -> Any:
    """One value of a case, of any key."""
    if isinstance(value, str):
        if len(value) > _LONGEST_TEXT:
            raise ValueError(f"a text of {len(value):,} characters; {_LONGEST_TEXT:,} are the most")
    elif value is not None and not isinstance(value, bool):
        if not isinstance(value, (int, float)):
            raise ValueError(f"{shown(value)} is not flat: a case holds text, numbers, true, false and null")
        if not abs(value) <= 1e30:
            raise ValueError(f"{shown(value)} is too large a number, or none")
    return value


Scalar = Annotated[Any, AfterValidator(_flat)]

_COUNTS = (
    "batch",
    "best_step",
    "beams",
    "embed_dim",
    "ffn_dim",
    "group_size",
    "head_dim",
    "heads",
    "image_size",
    "k",
    "kv_heads",
    "layers",
    "layers_left",
    "length",
    "m",
    "max_seqlen_k",
    "max_seqlen_q",
    "n",
    "num_heads",
    "num_layers",
    "order",
    "parameters",
    "position",
    "rows",
    "seed",
    "seqlen_k",
    "seqlen_q",
    "sequences",
    "step",
    "steps",
    "stride_bytes",
    "threads",
    "tokens",
    "vocab",
    "vocab_multiple",
    "vocab_size",
)
_AMOUNTS = (
    "dropout",
    "epochs",
    "label_smoothing",
    "magnitude",
    "overflow_magnitude",
    "price_per_hour",
    "size_kib",
    "training_s",
)
_FLAGS = (
    "allclose_sdpa",
    "bias",
    "captured",
    "deterministic",
    "drawn",
    "fused",
    "kept",
    "lse",
    "native",
    "norm_first",
    "out_of_budget",
    "overflow",
    "seeded",
    "sinks",
    "tied",
    "tuned",
    "verified",
)
Known = TypedDict(
    "Known",
    {
        **dict.fromkeys(_COUNTS, NotRequired[Optional[Count]]),  # type: ignore[misc]
        **dict.fromkeys(_AMOUNTS, NotRequired[Optional[Amount]]),
        **dict.fromkeys(_FLAGS, NotRequired[Optional[bool]]),
    },
)
"""Keys of a case that are numbers or flags, whatever the suite; others hold anything flat."""


class Line(TypedDict):
    """A record as it stands in a file."""

    suite: Name
    case: Annotated[dict[Name, Scalar], Field(max_length=100)]
    peer: Name
    peer_version: Optional[Name]
    metric: Name
    value: Optional[Value]
    unit: Unit
    low: Optional[Value]
    high: Optional[Value]
    n: Count
    device: Name
    clocks: Optional[Name]
    power_w: Optional[Amount]
    torch: Name
    cuda: Optional[Name]
    fuseline: Name
    commit: Optional[Name]
    time: Instant
    kernels: NotRequired[Optional[Annotated[dict[Name, Name], Field(max_length=100)]]]


# Figures that nothing real has 0 of: a time, a rate, a ratio of two of them.
_ABOVE_ZERO = (
    "time_us",
    "host_us",
    "iteration_ms",
    "iteration_mean_ms",
    "bandwidth_gbs",
    "tflops",
    "tokens_per_s",
    "samples_per_s",
    "speedup",
    "paired_speedup",
    "paired_over_bf16",
    "epoch_s",
    "ttft_ms",
    "training_s",
    "latency_ns",
    "latency_cycles",
    "amdahl_limit",
    "intensity",
)
_DIRECTIONS = ("fw", "bw", "fwbw")
# Records of these suites without that key are shown in a plain table, which needs nothing.
_DRAWN_BY = {"compile": "model", "decode": "position"}
# The keys that a page groups and orders a suite's records by, with the values that they have where those are
# few; by the section in their case, or whatever that is ("*"; only where there is one: "+").
_NEEDED: Mapping[tuple[str, str | None], Mapping[str, tuple[str, ...]]] = {
    ("attention", "small"): {
        **dict.fromkeys(("batch", "dtype", "embed_dim", "heads", "op", "seqlen_q"), ()),
        "form": ("shared", "full", "block", "bar"),
    },
    **{
        ("attention", section): dict.fromkeys(
            (
                "batch",
                "causal",
                "direction",
                "dtype",
                "head_dim",
                "heads",
                "kv_heads",
                "seqlen_k",
                "seqlen_q",
            ),
            (),
        )
        for section in ("short", "long", "drawn", "decode", "masks", "picker")
    },
    ("compile", "*"): dict.fromkeys(("model", "rung"), ()),
    ("decode", "climb"): dict.fromkeys(("lever", "order", "rung"), ()),
    ("decode", "*"): dict.fromkeys(("batch", "format", "position", "preset"), ()),
    ("hardware", "+"): {"what": ()},
    ("linear", "+"): dict.fromkeys(("dtype", "format", "k", "m", "n"), ()),
    ("ops", "seed"): {
        **dict.fromkeys(("captured", "dtype", "n", "rows"), ()),
        "direction": ("fw", "bw"),
        "op": ("layer_norm", "softmax"),
    },
    ("quality", "formats"): dict.fromkeys(("data", "format", "rounding", "run"), ()),
    **{
        ("translation", section): {"kernels": ("formulas", "torch", "fuseline", "nothing")}
        for section in ("epoch", "quality", "curve")
    },
}


def checked_line(text: str | bytes, place: str) -> dict[str, Any]:
    """The fields of a record in a line of JSON. `InputError`, naming `place`, for whatever a page cannot be
    drawn from."""
    if len(text) > LINE_BYTES:
        raise InputError(f"{place}: it has {len(text):,} bytes; a record has a few hundred.")
    line: dict[str, Any] = {**checked_json(Line, text, place)}
    case, metric = line["case"], line["metric"]
    checked_values(Known, case, f"{place}: case")
    for name in ("value", "low", "high"):
        if metric in _ABOVE_ZERO and line[name] is not None and line[name] <= 0:
            raise InputError(f"{place}: {name} is {shown(line[name])}, and {metric} is always above 0.")
    if line["low"] is not None and line["high"] is not None and line["low"] > line["high"]:
        raise InputError(f"{place}: low is {shown(line['low'])}, which is above high, {shown(line['high'])}.")
    _check_needed(line["suite"], case, place)
    return line


def _check_needed(suite: str, case: Mapping[str, Any], place: str) -> None:
    section = case.get("section")
    drawn = _DRAWN_BY.get(suite) is None or _DRAWN_BY[suite] in case
    for of in () if not drawn else ("*", section) if section is None else ("*", "+", section):
        for key, choices in _NEEDED.get((suite, of), {}).items():
            value = case.get(key)
            if value is None:
                raise InputError(f"{place}: its case lacks {key}, which records of the suite {suite} have.")
            if choices and value not in choices:
                raise InputError(f"{place}: case.{key} is {shown(value)}, not one of {', '.join(choices)}.")
    if case.get("direction", "fw") not in (*_DIRECTIONS, None):
        raise InputError(
            f"{place}: case.direction is {shown(case['direction'])}, not one of {', '.join(_DIRECTIONS)}."
        )
