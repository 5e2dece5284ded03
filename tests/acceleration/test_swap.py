"""What a swapped forward looks at before each call, and what copying, saving and compiling make of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations

from fuseline.acceleration import accelerate
from fuseline.acceleration.handle import Acceleration
from fuseline.errors import InputError

Make = Callable[..., Acceleration]
WIDTH = 16


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(WIDTH)), 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(), Gated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(WIDTH, 2), nn.Linear(2, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 5, WIDTH)


def declined(fast: Acceleration, path: str) -> dict[str, int]:
    return next(site.declined for site in fast.report().sites if site.path == path)


def original(model: Model, x: torch.Tensor) -> torch.Tensor:
    """What the model computes without its swaps."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        vars(module).pop("forward", None)
    return twin(x)


def test_everything_stays_but_the_attribute(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    kinds = [type(m) for m in model.modules()]
    parameters, state = list(model.named_parameters()), copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    fast = keep_all(model, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert [type(m) for m in model.modules()] == kinds
    assert all(a is b for (_, a), (_, b) in zip(parameters, model.named_parameters(), strict=True))
    assert state.keys() == model.state_dict().keys()
    assert all(p.grad is None for p in model.parameters())
    assert {name for name, m in model.named_modules() if "forward" in vars(m)} == {"norm", "mlp"}
    assert fast.undo() is model
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda m: m.mlp.gate.register_forward_hook(lambda *_: None), "gate has hooks"),
        (lambda m: m.mlp.down.register_forward_pre_hook(lambda *_: None), "down has hooks"),
        (lambda m: m.mlp.up.register_full_backward_hook(lambda *_: None), "up has hooks"),
        (lambda m: setattr(m.mlp, "up", LoRA(m.mlp.up)), "up was replaced"),
        (lambda m: setattr(m.mlp, "act", nn.ReLU()), "act was replaced"),
        (lambda m: parametrizations.weight_norm(m.mlp.gate), "gate was replaced"),
        (lambda m: m.mlp.act.eval(), "act is in another mode"),
        (lambda m: setattr(m.mlp.up, "forward", lambda x: x.new_zeros(*x.shape[:-1], 32)), "of its own"),
    ],
)
def test_a_changed_child_is_respected(
    change: Callable[[Model], object], reason: str, model: Model, x: torch.Tensor, keep_all: Make
) -> None:
    fast = keep_all(model, x)
    change(model)
    expected = type(model.mlp).forward(model.mlp, model.norm(x)) + x
    assert torch.equal(model(x), expected)
    (told,) = declined(fast, "mlp")
    assert reason in told


def test_a_changed_number_is_respected(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    fast = keep_all(model, x)
    near = model(x)
    model.norm.eps = 3.0
    assert torch.allclose(model(x), original(model, x), rtol=1e-5)
    assert not torch.allclose(model(x), near, rtol=1e-2)
    assert "number" in next(iter(declined(fast, "norm")))


def test_hooks_on_all_modules_are_respected(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    fast, seen = keep_all(model, x), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m)))
    try:
        model(x)
    finally:
        handle.remove()
    assert seen.count(nn.Linear) == 3
    assert "all modules" in next(iter(declined(fast, "mlp")))


def test_hooks_on_the_module_itself_go_on_working(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    model.mlp.register_forward_hook(lambda module, args, out: out * 2)
    expected = model(x)
    fast = keep_all(model, x)
    assert torch.allclose(model(x), expected, rtol=1e-5, atol=1e-6)
    assert fast.report().declined == 0


@pytest.mark.parametrize(
    "prepare, reason",
    [
        (lambda m: m.mlp.gate.register_forward_hook(lambda *_: None), "gate has hooks"),
        (lambda m: setattr(m.mlp, "forward", m.mlp.forward), "replaced on the instance"),
    ],
)
def test_what_stands_there_already_is_refused(
    prepare: Callable[[Model], object], reason: str, model: Model, x: torch.Tensor, keep_all: Make
) -> None:
    prepare(model)
    sites = {site.path: site for site in keep_all(model, x).sites}
    assert sites["mlp"].status == "refused"
    assert reason in sites["mlp"].reason


def test_a_parametrized_weight_is_never_gone_around(x: torch.Tensor, keep_all: Make) -> None:
    model = Model()
    parametrizations.weight_norm(model.mlp.gate)
    expected = model(x)
    fast = keep_all(model, x)
    assert not any(site.path == "mlp" and site.status == "kept" for site in fast.sites)
    assert torch.allclose(model(x), expected, rtol=1e-5, atol=1e-6)


def test_other_dtypes_and_widths_run_the_original(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    fast = keep_all(model, x)
    model.double()
    assert torch.equal(model(x.double()), original(model, x.double()))
    assert "proved" in next(iter(declined(fast, "norm")))


def test_other_lengths_run_the_op(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    fast = keep_all(model, x)
    longer = torch.randn(7, 3, WIDTH)
    assert torch.allclose(model(longer), original(model, longer), atol=1e-5)
    assert torch.allclose(model.eval()(longer), original(model, longer), atol=1e-5)
    assert fast.report().declined == 0


def test_strict_raises_where_the_original_would_run(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    fast = keep_all(model, x, strict=True)
    model(x)
    model.double()
    with pytest.raises(RuntimeError, match="strict=True"):
        model(x.double())
    fast.undo()
    model(x.double())


def test_transforms_of_functions_run_the_original(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    fast = keep_all(model, x)
    ours = torch.func.vmap(model)(x)
    assert torch.allclose(ours, original(model, x), atol=1e-5)
    assert "torch.func" in next(iter(declined(fast, "norm")))
    _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    assert tangent.shape == x.shape


def test_functional_call_reads_what_it_is_given(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    keep_all(model, x)
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert torch.equal(torch.func.functional_call(model, zeros, (x,)), x)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_forwards_of_its_own(
    duplicate: Callable[[Any], Any], model: Model, x: torch.Tensor, keep_all: Make
) -> None:
    fast = keep_all(model, x)
    before = model(x)
    twin = duplicate(model)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        twin.norm.weight.zero_()
        twin.mlp.down.bias.zero_()
    assert not torch.equal(twin(x), before)
    assert torch.equal(model(x), before)
    twin.norm.eps = 2.0
    assert torch.allclose(twin(x), original(twin, x), atol=1e-6)
    fast.undo()
    assert "forward" in vars(twin.norm)


def test_weights_are_loaded_and_moved_as_before(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    keep_all(model, x)
    other = Model()
    model.load_state_dict(other.state_dict())
    assert torch.allclose(model(x), other(x), atol=1e-6)
    assert torch.allclose(model.to("cpu")(x), other(x), atol=1e-6)


def test_gradient_checkpointing(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    keep_all(model, x)
    plain = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    again = torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=False)
    recomputed = torch.autograd.grad(again.sum(), list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_in_one_graph(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    keep_all(model, x)
    before = model(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), before, atol=1e-6)
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(x)
    assert any("rms_norm" in name for name in seen)
    assert any("swiglu" in name for name in seen)
    torch._dynamo.reset()


def test_a_model_that_is_compiled_already(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    before = compiled(x)
    fast = keep_all(compiled, x)
    assert {site.kind for site in fast.kept} == {"rms_norm", "gated_mlp"}
    assert torch.allclose(compiled(x), before, atol=1e-6)
    step = fast.training_step(
        torch.optim.SGD(model.parameters(), lr=0.0), precision="fp32", loss=lambda out, _: out.square().mean()
    )
    assert torch.allclose(step(x), before.square().mean(), atol=1e-6)
    fast.undo()
    assert torch.equal(compiled(x), before)
    torch._dynamo.reset()


def test_shards_of_fsdp_lie_apart_again(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    """An optimizer that is made after accelerate trains the shards."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        before = model(x)
        fully_shard(model, mesh=distributed.init_device_mesh("cpu", (1,)))
        keep_all(model, x)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert torch.allclose(model(x), before, atol=1e-6)
    finally:
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_modules_are_left_alone(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    model.norm = torch.jit.script(nn.LayerNorm(WIDTH))
    before = model(x)
    fast = keep_all(model, x)
    assert {site.path for site in fast.kept} == {"mlp"}
    assert torch.allclose(model(x), before, atol=1e-6)


def test_an_expert_that_gets_no_rows(x: torch.Tensor, keep_all: Make) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([Gated(), Gated()])

        def forward(self, x: torch.Tensor, first: int = 5) -> torch.Tensor:
            return torch.cat([self.experts[0](x[:, :first]), self.experts[1](x[:, first:])], 1)

    model = Experts()
    before = model(x), model(x, 2), model(x, 0)
    fast = keep_all(model, x)
    said = {site.path: (site.status, site.reason) for site in fast.sites if site.kind == "gated_mlp"}
    assert said["experts.0"][0] == "kept"
    assert said["experts.1"] == ("refused", "the batch calls it with empty tensors only")
    for ours, theirs in zip((model(x), model(x, 2), model(x, 0)), before, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_shared_module_is_one_site(x: torch.Tensor, keep_all: Make) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Norm()
            self.second = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(F.gelu(self.first(x)))

    model = Shared()
    before = model(x)
    fast = keep_all(model, x)
    (site,) = fast.sites
    assert (site.path, site.also) == ("first", ("second",))
    assert torch.allclose(model(x), before, atol=1e-6)
    assert fast.report().taken == 2


def test_a_layer_with_two_names_keeps_its_weights(x: torch.Tensor, keep_all: Make) -> None:
    model = Model()
    model.mlp.up = model.mlp.gate
    before, weight = model(x), model.mlp.gate.weight
    fast = keep_all(model, x)
    assert model.mlp.gate.weight is weight
    assert {site.kind for site in fast.kept} >= {"gated_mlp"}
    assert torch.allclose(model(x), before, atol=1e-6)


def test_only_and_skip(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    assert {site.path for site in keep_all(model, x, only="norm").sites} == {"norm"}
    for module in model.modules():
        vars(module).pop("forward", None)
    assert {site.path for site in keep_all(model, x, skip=["m*"]).sites} == {"norm"}


def test_what_the_user_got_wrong(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    with pytest.raises(InputError, match="fits no module"):
        accelerate(model, x, only="nom")
    with pytest.raises(InputError, match="level"):
        accelerate(model, x, levels=("exat",))
    with pytest.raises(InputError, match=r"torch\.nn\.Module"):
        accelerate(len, x)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="meta device"):
        accelerate(copy.deepcopy(model).to("meta"), x)
    assert "nn.Sequential" in str(keep_all(nn.LayerNorm(WIDTH), x))
    keep_all(model, x)
    with pytest.raises(InputError, match="already"):
        accelerate(model, x)


def test_a_dry_run_changes_nothing(model: Model, x: torch.Tensor, keep_all: Make) -> None:
    fast = keep_all(model, x, dry_run=True)
    assert {site.path: site.status for site in fast.sites} == {
        "norm": "found",
        "mlp": "found",
        "mlp.act": "found",
    }
    assert not any("forward" in vars(m) for m in model.modules())
