"""The launchers of the small attention layer and of decoding steps launch what their plans say, and all of
their kernels: linked to a CUDA runtime that only writes launches down, they take random problems on GPUs that
the test makes up. Needs nvcc, and no GPU."""

from __future__ import annotations

import ctypes
import random
import re

import pytest
import torch

from fuseline import native
from fuseline.native.compilers import find_nvcc
from fuseline.ops.op import DTYPES
from fuseline.ops.plans import GPUS, Gpu, Plan, explain

from .layer_records import LayerGradientsRecord, LayerRecord, StepRecord
from .recorder import Recorder, agree, recorder_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_nvcc().compiler is None, reason=f"needs nvcc: {find_nvcc().reason}"),
    pytest.mark.skipif(not native.ready("cpu"), reason="the native core, which decides, is missing"),
]

LAYER = ("small_layer_forward", "small_layer_backward", "small_layer_sm90a")
STEP = ("decode_step", "argmax_step")
GPUS_AND_MORE = (*GPUS.values(), Gpu("small", 20, 101376, 102400, 600, clusters=True, warpgroups=False))
PROBLEMS = 3000


@pytest.fixture(scope="module")
def layers() -> Recorder:
    return recorder_of("layer_launch_recorder", LAYER)


@pytest.fixture(scope="module")
def steps() -> Recorder:
    return recorder_of("step_launch_recorder", STEP)


def same(plans: tuple[Plan, ...], launched: list[tuple[str, int, int, int, int]]) -> None:
    assert len(launched) == sum(bool(plan.kernel) for plan in plans), (plans, launched)
    for plan, (name, *layout) in zip(plans, launched, strict=False):
        assert re.search(rf"\d{plan.kernel}I", name), f"{name} is not {plan}"
        assert layout == [plan.blocks, plan.threads_per_row, plan.blocks_per_row, plan.shared_bytes], plan


def pointed(record: ctypes.Structure, first: int) -> None:
    """Gives all of its pointers an address each; nothing reads there."""
    names = [name for name, kind, *_ in record._fields_ if kind is ctypes.c_void_p]
    for place, name in enumerate(names, first):
        setattr(record, name, place << 40)


def test_layers(layers: Recorder) -> None:
    draw, ran, answers = random.Random(0), set(), {True: 0, False: 0}
    library = layers.library
    for index, gpu in enumerate(GPUS_AND_MORE):
        layers.set(index, gpu, 8)
        for _ in range(PROBLEMS):
            heads, width = draw.choice([1, 2, 4, 6, 8, 12]), draw.choice([16, 16, 24, 32, 64, 64, 128])
            shared = draw.random() < 0.2
            options = {
                "heads": heads,
                "head_dim": width,
                "kv_heads": draw.choice([heads, heads, heads, 1, 2]),
                "out_dim": draw.choice([8, 40, 256, 512, 1024, heads * width]),
                "captured": draw.random() < 0.5,
                "shared": shared,
                "tf32": draw.random() < 0.5,
            }
            if heads % options["kv_heads"]:
                continue
            E = heads * width if shared else draw.choice([64, 192, 256, 512, 1024, heads * width])
            shape = draw.choice([1, 2, 3, 8, 8, 64]), draw.choice([10, 16, 30, 64, 100, 128, 140]), E
            dtype = draw.choice([torch.bfloat16, torch.float32, torch.float32, torch.float16])
            call = LayerRecord(dtype=DTYPES.index(dtype), tf32=options["tf32"], softmax_scale=0.1)
            call.batch, call.seqlen, call.embed_dim = shape
            call.num_heads, call.num_kv_heads, call.head_dim = heads, options["kv_heads"], width
            call.out_dim, call.shared_projection = options["out_dim"], shared
            pointed(call, 1)
            gradients = LayerGradientsRecord()
            pointed(gradients, 30)
            library.recorder_capture(int(options["captured"]))
            plans = explain("self_attention_layer", shape, dtype, gpu=gpu, **options).plans
            forward, backward = (
                tuple(p for p in plans if p.work == work) for work in ("forward", "backward")
            )
            answer = library.fuseline_small_layer_forward(ctypes.byref(call), None)
            launched = layers.taken()
            same(forward, launched)
            answers[answer == 0] += 1
            assert (answer == 0) == bool(launched)
            fits = library.fuseline_small_layer_fits(ctypes.byref(call), 0)
            assert fits <= (answer == 0)
            assert options["captured"] or fits == (answer == 0), "the question is about eager calls, too"
            ran |= {name for name, *_ in launched}
            answer = library.fuseline_small_layer_backward(ctypes.byref(call), ctypes.byref(gradients), None)
            launched = layers.taken()
            same(backward, launched)
            assert (answer == 0) == bool(launched)
            assert library.fuseline_small_layer_fits(ctypes.byref(call), 1) == bool(fits and answer == 0)
            ran |= {name for name, *_ in launched}
    assert min(answers.values()) > PROBLEMS
    assert not layers.kernels() - ran, "no problem takes them"


def test_whole_steps(steps: Recorder) -> None:
    draw, ran, refused = random.Random(1), set(), 0
    workspace = steps.library.fuseline_decode_step_workspace
    workspace.restype = ctypes.c_int64
    for index, gpu in enumerate(GPUS_AND_MORE):
        steps.set(index, gpu, 8)
        for _ in range(PROBLEMS // 5):
            heads, layers, swiglu = draw.choice([4, 6, 12]), draw.choice([1, 6, 12, 30]), draw.random() < 0.5
            options = {
                "layers": layers,
                "heads": heads,
                "kv_heads": draw.choice([heads, 2]),
                "head_dim": draw.choice([64, 64, 128]),
                "vocab_size": draw.choice([65, 32000, 50257]),
                "swiglu": swiglu,
            }
            width = draw.choice([64, 384, 512, 768, 1024, 1536])
            options["ffn_dim"] = ffn = width * draw.choice([2, 3, 4])
            dtype = draw.choice([*[torch.bfloat16] * 4, torch.float16])
            call = StepRecord(
                dtype=DTYPES.index(dtype), norm=1, activation=3 if swiglu else draw.choice([1, 2])
            )
            pointed(call, 1)
            for layer in call.layers[:layers]:
                pointed(layer, 40)
            call.num_layers, call.embed_dim, call.heads, call.kv_heads = (
                layers,
                width,
                heads,
                options["kv_heads"],
            )
            call.head_dim, call.ffn_dim, call.vocab_size = options["head_dim"], ffn, options["vocab_size"]
            call.head_stride = 1024 * call.head_dim
            (plan,) = explain("decode_step", (1, width), dtype, gpu=gpu, **options).plans
            wanted = workspace(ctypes.byref(call))
            answer = steps.library.fuseline_decode_step(ctypes.byref(call), None)
            launched = steps.taken()
            same((plan,), launched)
            assert (answer == 0) == bool(launched)
            assert wanted == (answer or plan.workspace_bytes)
            refused += answer != 0
            ran |= {name for name, *_ in launched}
    assert refused > PROBLEMS // 5, "all steps of the GPUs without clusters, and some of others"
    assert {name for name in steps.kernels() if "11decode_step" in name} == ran


def test_ends_of_steps(steps: Recorder) -> None:
    draw = random.Random(2)
    for index, gpu in enumerate(GPUS_AND_MORE):
        steps.set(index, gpu, 8)
        for _ in range(PROBLEMS // 10):
            rows, n, dtype = draw.choice([1, 2, 8, 64, 500]), int(2 ** draw.uniform(0, 20)), draw.randrange(3)
            (plan,) = explain("argmax_step", (rows, n), DTYPES[dtype], gpu=gpu).plans
            addresses = ctypes.c_void_p(1 << 40), ctypes.c_void_p(2 << 40), ctypes.c_void_p(3 << 40)
            sizes = ctypes.c_int64(rows), ctypes.c_int64(n), ctypes.c_int64(n)
            agree(plan, 8, steps.launched("fuseline_argmax_step", *addresses, *sizes, dtype, None))
