"""Llama, Mistral and Qwen in Hugging Face's format: logits equal to `transformers`' in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuseline.errors import InputError
from fuseline.models.gpt import GPT, GPTConfig
from fuseline.models.gpt_checkpoints import save_nanogpt
from fuseline.models.gpt_hugging_face import save_hugging_face
from fuseline.models.llama import Llama, preset
from fuseline.models.llama_hugging_face import load_llama, save_llama
from fuseline.models.pretrained import load_model

TOKENS = torch.randint(0, 97, (2, 60), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def fresh(**changes: Any) -> Llama:
    torch.manual_seed(0)
    return Llama(preset("llama-tiny", **changes)).eval()


@pytest.mark.parametrize(
    "family,options",
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("Llama", {"rope_parameters": LLAMA3}),
        ("Mistral", {"sliding_window": 9}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
        ("Qwen3", {"head_dim": 32}),
    ],
)
def test_logits_equal_those_of_transformers(
    tmp_path: Path, transformers: Any, family: str, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    ours = load_model(tmp_path / "theirs")
    expected = theirs(TOKENS).logits
    torch.testing.assert_close(ours(TOKENS), expected, rtol=1e-5, atol=1e-5)
    save_llama(ours, tmp_path / "ours")
    assert load_llama(tmp_path / "ours").config == ours.config
    back, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    torch.testing.assert_close(back.eval()(TOKENS).logits, expected, rtol=0, atol=0)


def test_dtype_context_and_kernels_are_the_callers(tmp_path: Path) -> None:
    save_llama(fresh(), tmp_path)
    model = load_llama(tmp_path, dtype=torch.bfloat16, block_size=32, kernels="torch")
    assert model.head.weight.dtype is torch.bfloat16
    assert model.rotary.cos is not None
    assert model.rotary.cos.shape == (32, 8)
    assert model.rotary.cos.dtype is torch.float32
    assert model.config.kernels == "torch"
    with pytest.raises(InputError, match="context is 256 positions, not 512"):
        load_llama(tmp_path, block_size=512)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"model_type": "gemma"}, "model_type is 'gemma'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_hidden_layers": 3}, r"lacks model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"has unknown model\.layers\.1"),
        ({"intermediate_size": 175}, "do not belong together"),
        ({"vocab_size": 511}, "do not belong together"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' is not one of"),
        ({"quantization_config": {}}, "quantized already"),
        ({"hidden_size": "wide"}, "does not describe a Llama"),
        ({"layer_types": ["sliding_attention", "full_attention"], "model_type": "qwen3",
          "use_sliding_window": True, "sliding_window": 4}, "unknown pattern"),
    ],
)  # fmt: skip
def test_configs_that_do_not_match_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_llama(fresh(), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(InputError, match=message):
        load_model(tmp_path)


def test_incomplete_and_broken_weights_are_refused(tmp_path: Path) -> None:
    save_llama(fresh(), tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    whole = file.read_bytes()
    save_file({k: w for k, w in weights.items() if "layers.1.self_attn.v_proj" not in k}, file)
    with pytest.raises(InputError, match=r"lacks model\.layers\.1\.self_attn"):
        load_llama(tmp_path)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cut off"):
        load_llama(tmp_path)
    file.unlink()
    with pytest.raises(InputError, match=r"neither model\.safetensors nor"):
        load_llama(tmp_path)


def test_load_model_knows_what_it_reads(tmp_path: Path) -> None:
    gpt = GPT(GPTConfig(16, 37, 1, 2, 16)).eval()
    save_hugging_face(gpt, tmp_path / "gpt")
    save_nanogpt(gpt, tmp_path / "ckpt.pt")
    tokens = TOKENS[:, :9] % 37
    for name in ("gpt", "ckpt.pt"):
        assert torch.equal(load_model(tmp_path / name)(tokens), gpt(tokens))
    with pytest.raises(InputError, match="There is no model at"):
        load_model(tmp_path / "nowhere")
