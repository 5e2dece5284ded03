"""The kernel of a whole step against its definition; run by `test_decode_step.py`."""

from __future__ import annotations

import pytest
import torch

from fuseline.generation.decoder import Decoder
from fuseline.models.gpt import GPT
from fuseline.models.llama import Llama
from fuseline.models.whole_step import whole_step
from fuseline.ops.decode_step import decode_step, reference, workspace

from .decode_step_models import MODELS, made


def held(model: GPT | Llama, capacity: int, length: int, device: str) -> tuple[torch.Tensor, ...]:
    """A cache with `length` positions, one more token, and where it stands."""
    config = model.config
    dtype = next(model.parameters()).dtype
    shape = config.num_layers, 1, config.num_kv_heads, capacity, config.head_dim
    draw = torch.Generator().manual_seed(length)
    k, v = (torch.randn(*shape, generator=draw).to(device, dtype) for _ in range(2))
    return torch.tensor([7], device=device), k, v, torch.tensor([length], device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [0, 1, 37, 200, 385, 1000])
@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_is_the_definition(name: str, length: int) -> None:
    dtype = torch.bfloat16
    changes = {} if name.startswith("gpt") else {"block_size": 1024}
    model = made(name, **changes).cuda()
    exact = whole_step(made(name, **changes).to(dtype).double().cuda())
    step = whole_step(model.to(dtype))
    assert step is not None
    assert exact is not None
    room = workspace(step)
    assert room is not None
    token, k, v, at = held(model, 1024, length, "cuda")
    wide = k.double(), v.double()
    expected = reference(exact, token.clone(), *wide, at.clone())
    plain = reference(step, token.clone(), k.clone(), v.clone(), at.clone())
    bound = 2 * _error(plain, expected) + 1e-3
    for _ in range(3):  # the workspace is ready for the next step
        found, k_found, v_found, held_at = token.clone(), k.clone(), v.clone(), at.clone()
        logits = decode_step(step, found, k_found, v_found, held_at, room)
        assert _error(logits, expected) <= bound
        assert int(found) == int(logits[0].argmax())
        assert int(held_at) == length + 1
        assert _error(k_found, wide[0]) < 1e-2
        assert torch.equal(k_found[..., :length, :], k[..., :length, :])


@pytest.mark.gpu
def test_steps_follow_one_another() -> None:
    model = made("gpt").to("cuda", torch.bfloat16)
    whole, parts = Decoder(model, batch=1, capacity=500), Decoder(model, batch=1, capacity=500, whole=False)
    prompt = list(range(300))
    for decoder in (whole, parts):
        decoder.begin([prompt])
    same = 0
    for _ in range(100):
        same += int(whole.advance()) == int(parts.advance())
        parts.tokens_B.copy_(whole.tokens_B)
    assert same >= 90  # a rounding may turn what is nearly equal


@pytest.mark.gpu
def test_two_chains_of_steps_at_once() -> None:
    """On two streams: a step's blocks wait for each other, and those of another may not keep them out."""
    model = made("gpt").to("cuda", torch.bfloat16)
    prompts = [list(range(40)), list(range(90))]

    def begun(prompt: list[int]) -> Decoder:
        decoder = Decoder(model, batch=1, capacity=300)
        decoder.begin([prompt])
        return decoder

    alone = []
    for decoder in map(begun, prompts):
        alone.append([int(decoder.advance()) for _ in range(60)])
    decoders, streams = [begun(prompt) for prompt in prompts], [torch.cuda.Stream() for _ in prompts]
    torch.cuda.synchronize()
    together: list[list[torch.Tensor]] = [[], []]
    for _ in range(60):
        for decoder, stream, tokens in zip(decoders, streams, together, strict=True):
            with torch.cuda.stream(stream):
                tokens.append(decoder.advance().clone())
    torch.cuda.synchronize()
    assert [[int(token) for token in tokens] for tokens in together] == alone


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).detach().item()
