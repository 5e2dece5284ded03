"""The vision transformer: its size, its arithmetic against torch's own encoder layer, and its errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuseline.errors import InputError
from fuseline.models.vit import EncoderBlock, ViT, ViTConfig

SMALL = ViTConfig(
    image_size=16, patch_size=4, num_layers=2, num_heads=2, embed_dim=8, mlp_dim=16, num_classes=5
)


def test_vit_b_16_has_86_567_656_parameters_and_197_tokens() -> None:
    with torch.device("meta"):
        model = ViT(ViTConfig())
    assert sum(p.numel() for p in model.parameters()) == 86_567_656
    assert model.config.seqlen == 197


def test_a_block_computes_what_torchs_pre_norm_encoder_layer_computes() -> None:
    torch.manual_seed(0)
    block = EncoderBlock(SMALL).double()
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, activation="gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True
    ).double()
    pairs = {
        "self_attn.in_proj_weight": block.attention.qkv.weight,
        "self_attn.in_proj_bias": block.attention.qkv.bias,
        "self_attn.out_proj.weight": block.attention.proj.weight,
        "self_attn.out_proj.bias": block.attention.proj.bias,
        "linear1.weight": block.fc_1.weight,
        "linear1.bias": block.fc_1.bias,
        "linear2.weight": block.fc_2.weight,
        "linear2.bias": block.fc_2.bias,
        "norm1.weight": block.norm_1.weight,
        "norm1.bias": block.norm_1.bias,
        "norm2.weight": block.norm_2.weight,
        "norm2.bias": block.norm_2.bias,
    }
    layer.load_state_dict({name: value.detach() for name, value in pairs.items()})
    x_BTC = torch.randn(3, 7, 8, dtype=torch.float64)
    torch.testing.assert_close(block(x_BTC), layer(x_BTC))


def test_patches_are_read_row_by_row_after_the_class_token() -> None:
    torch.manual_seed(0)
    model = ViT(SMALL).double()
    images = torch.randn(1, 3, 16, 16, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    model(images)
    # Patch (1, 2) is token 1 + 1 * 4 + 2: the projection of the pixels of rows 4..8, columns 8..12.
    patch = images[0, :, 4:8, 8:12].reshape(-1)
    projected = model.patches.weight.reshape(8, -1) @ patch + model.patches.bias
    torch.testing.assert_close(seen[0][0, 7], projected + model.positions[0, 7])
    torch.testing.assert_close(seen[0][0, 0], model.class_token[0, 0] + model.positions[0, 0])


def test_the_loss_is_the_cross_entropy_of_the_logits_and_reaches_every_parameter() -> None:
    torch.manual_seed(0)
    model = ViT(SMALL)
    images, labels_B = torch.randn(4, 3, 16, 16), torch.tensor([0, 4, 2, 2])
    loss = model(images, labels_B)
    torch.testing.assert_close(loss, F.cross_entropy(model(images), labels_B))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match="image_size 225 is not a multiple of patch_size 16"):
        ViTConfig(image_size=225)
    with pytest.raises(InputError, match="embed_dim 768 is not a multiple of num_heads 7"):
        ViTConfig(num_heads=7)
