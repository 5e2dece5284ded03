"""The adapters: each present peer computes the op, and each says what it cannot do."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fuseline.bench.ops.accuracy import errors_of
from fuseline.bench.ops.bound import Computation, bind_inputs
from fuseline.bench.ops.plan import Place
from fuseline.bench.peers import PEERS, UnsupportedError, find_peers
from fuseline.bench.peers.peer import why_not_importable
from fuseline.errors import InputError
from fuseline.ops import Case, Op, get, registered
from fuseline.ops.op import outputs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def inputs_of(op: str, shape: tuple[int, ...] = (5, 24), **options: object) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    return get(op).inputs(Case("test", shape, options), CPU, torch.float32, generator)


@pytest.mark.parametrize("name", ["fuseline", "eager"])
def test_softmax_and_layer_norm_are_computed(name: str) -> None:
    peer = PEERS[name]
    assert peer.why_not(CPU) is None
    x = inputs_of("softmax")
    torch.testing.assert_close(peer.bind(get("softmax"), x)(), F.softmax(x["x"], -1))  # type: ignore[arg-type]
    norm = inputs_of("layer_norm")
    expected = F.layer_norm(norm["x"], (24,), norm["weight"], norm["bias"])  # type: ignore[arg-type]
    torch.testing.assert_close(peer.bind(get("layer_norm"), norm)(), expected)


@pytest.mark.parametrize("name", [op.name for op in registered() if op.mixed is not None])
def test_eager_does_the_same_work_in_mixed_precision(name: str) -> None:
    """Results of the same dtypes: what is not rounded to 16 bits is another result."""
    op = get(name)
    case = Place(op, torch.bfloat16, 6, 40, mixed=True).case
    bound = bind_inputs(op, case, torch.bfloat16, CPU, 0).without_dropout()
    found, wanted = (
        outputs(call) for call in (PEERS["eager"].bind(op, bound.inputs)(), op.reference(**bound.inputs))
    )
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in wanted]
    assert found[0].dtype is torch.bfloat16
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    if name == "layer_norm":
        with pytest.raises(UnsupportedError, match="liger has no out_dtype"):
            PEERS["liger"].bind(op, bound.inputs)


def test_eager_runs_torchs_own_function_and_the_reference_for_options_that_has_not() -> None:
    with torch.autograd.profiler.profile() as profile:
        PEERS["eager"].bind(get("softmax"), inputs_of("softmax"))()
    calls = [event.name for event in profile.function_events]
    assert [name for name in calls if name in ("aten::softmax", "aten::masked_fill")] == ["aten::softmax"]
    capped = inputs_of("cross_entropy", soft_cap=2.0)
    result = PEERS["eager"].bind(get("cross_entropy"), capped)()
    assert torch.equal(result, get("cross_entropy").reference(**capped))


@pytest.mark.parametrize("mask", [None, "bool", "additive"])
@pytest.mark.parametrize("options", [{}, {"scale": 0.5}, {"causal": True}, {"causal": True, "scale": 0.5}])
def test_plain_softmax_has_every_option(options: dict[str, object], mask: str | None) -> None:
    """On rows that see something; torch gives NaN on others."""
    inputs = inputs_of("softmax", (2, 3, 9, 17), **options, **({"mask": mask} if mask else {}))
    if mask == "bool":
        inputs["mask"][..., 0] = True  # type: ignore[index]
    torch.testing.assert_close(
        PEERS["eager"].bind(get("softmax"), inputs)(), get("softmax").reference(**inputs)
    )


@pytest.mark.parametrize("op", registered(), ids=lambda op: op.name)
def test_eager_computes_every_op_as_the_benchmark_measures_it(op: Op) -> None:
    bound = bind_inputs(op, op.sweep(24, min(op.lengths, default=32)), torch.float32, CPU, seed=3)
    errors = errors_of(
        Computation.of(PEERS["eager"], bound.without_dropout()), bound.without_dropout().truth()
    )
    assert errors.worst < 1e-5


@pytest.mark.parametrize(
    "name, package",
    [
        ("liger", "liger-kernel"),
        ("quack", "quack-kernels"),
        ("apex", "git+https://github.com/NVIDIA/apex"),
        ("transformer-engine", "--no-build-isolation 'transformer_engine[pytorch]'"),
    ],
)
def test_an_absent_package_is_named_with_the_command_that_brings_it(name: str, package: str) -> None:
    module = {"liger": "liger_kernel", "quack": "quack", "apex": "apex"}.get(name, "transformer_engine")
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed here")
    reason = PEERS[name].why_not(CUDA)
    assert reason is not None
    assert f"pip install {package}" in reason


def test_a_package_that_breaks_at_import_is_no_peer_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks_at_import.py").write_text("raise TypeError('this torch is too new')")
    monkeypatch.syspath_prepend(tmp_path)
    reason = why_not_importable("breaks_at_import", "breaks", CUDA)
    assert reason == "does not import: TypeError: this torch is too new"


@pytest.mark.parametrize("name", ["liger", "quack", "apex", "transformer-engine"])
def test_what_a_peer_has_not_is_said(name: str) -> None:
    peer = PEERS[name]
    unknown = get("softmax").__class__(**{**vars(get("softmax")), "name": "convolution"})
    with pytest.raises(UnsupportedError, match=f"{name} has no convolution"):
        peer.bind(unknown, inputs_of("softmax"))
    with pytest.raises(UnsupportedError, match="weight and a bias"):
        peer.bind(get("layer_norm"), inputs_of("layer_norm", affine="none"))


def test_ours_comes_first_and_an_unknown_peer_is_met_with_the_nearest_name() -> None:
    assert [peer.name for peer in find_peers(("eager", "fuseline"))] == ["fuseline", "eager"]
    with pytest.raises(InputError, match=r"no peer named 'ligre'\. Did you mean 'liger'"):
        find_peers(("ligre",))


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:`torch\.jit:DeprecationWarning")  # from inductor's own imports
def test_inductor_computes_the_same() -> None:
    x = inputs_of("softmax")
    torch.testing.assert_close(
        PEERS["inductor"].bind(get("softmax"), x)(),
        F.softmax(x["x"], -1),  # type: ignore[arg-type]
    )


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from what the peers import
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax:UserWarning")  # inductor's own
@pytest.mark.parametrize("op", registered(), ids=lambda op: op.name)
@pytest.mark.parametrize("name", ["inductor", "max-autotune", "liger", "quack", "apex", "transformer-engine"])
def test_peers_on_a_gpu_agree_with_the_reference_both_ways(name: str, op: Op) -> None:
    peer = PEERS[name]
    if reason := peer.why_not(CUDA):
        pytest.skip(reason)
    torch._dynamo.reset()  # every op is compiled from one function, and that a few times only
    bound = bind_inputs(op, op.sweep(64, min(op.lengths, default=256)), torch.bfloat16, CUDA, seed=3)
    bound = bound.without_dropout()
    try:
        errors = errors_of(Computation.of(peer, bound), bound.truth())
    except UnsupportedError as reason:
        pytest.skip(str(reason))
    assert errors.worst < 0.03
