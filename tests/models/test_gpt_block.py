"""GPT's blocks: an MLP that is one op, and what a branch leaves to the next norm."""

from __future__ import annotations

import pytest
import torch

from fuseline.models.gpt import GPT, GPTConfig

from .small_gpt import draw, make, small


@pytest.mark.parametrize("norm, calls", [("fuseline", 2), ("torch", 0)])
def test_compiled_training_takes_the_mlp_as_one_op(norm: str, calls: int) -> None:
    model = make(small(norm=norm)).train()
    targets: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        targets.extend(node.target for node in graph.graph.nodes)
        return graph

    tokens, _ = draw(model.config)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend=backend)(tokens), model(tokens))
    assert targets.count(torch.ops.fuseline.mlp.default) == calls


@pytest.mark.parametrize("name", ["c_fc", "gelu", "c_proj"])
def test_hooks_of_the_mlp_are_called(name: str) -> None:
    models = [make(small(norm=norm)).train() for norm in ("fuseline", "torch")]
    tokens, targets = draw(models[0].config)
    for model in models:
        getattr(model.transformer.h[0].mlp, name).register_forward_hook(lambda module, given, out: out + 1)
    torch.testing.assert_close(models[0](tokens, targets), models[1](tokens, targets))


@pytest.mark.gpu
def test_wide_mlps_under_autocast_are_as_near_as_torchs() -> None:
    """16,384 rows of 768, where kernels have GELU at the products' ends."""
    sizes = {"num_layers": 1, "num_heads": 12, "embed_dim": 768, "block_size": 1024}
    grads = []
    for norm, dtype in (("torch", None), ("torch", torch.bfloat16), ("fuseline", torch.bfloat16)):
        model = make(small(norm=norm, **sizes)).cuda().train()
        tokens, targets = (ids.cuda() for ids in draw(model.config, batch=16, seqlen=1024))
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
            loss = model(tokens, targets)
        loss.backward()
        mlp = model.transformer.h[0].mlp
        grads.append([parameter.grad for parameter in mlp.parameters()])
    for exact, theirs, ours in zip(*grads, strict=True):
        assert ours.dtype is torch.float32
        assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


def test_a_wrapped_branch_and_another_norm_compute_the_same() -> None:
    """A branch leaves its bias and dropout to the next norm only if that adds them, and nobody listens."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(16, 50, 2, 2, 32, norm="fuseline")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    tokens = torch.randint(50, (2, 16))
    wanted = model(tokens)
    block, plain = model.transformer.h[0], torch.nn.LayerNorm(32, eps=1e-5)
    plain.load_state_dict(block.ln_2.state_dict())
    block.ln_2 = plain
    torch.testing.assert_close(model(tokens), wanted)
    seen: list[torch.Tensor] = []
    block.mlp.register_forward_hook(lambda module, given, result: seen.append(result))
    block.attn.register_forward_hook(lambda module, given, result: seen.append(result))
    torch.testing.assert_close(model(tokens), wanted)
    assert len(seen) == 2


def test_biases_and_norms_of_different_dtypes() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(16, 50, 2, 2, 32, norm="fuseline")).bfloat16()
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.float()
    tokens = torch.randint(50, (2, 16))
    assert model(tokens).isfinite().all()
