"""The LSTM language model: its size, and its arithmetic against the cell's equations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fuseline.models.lstm_lm import LSTMConfig, LSTMLanguageModel


def test_two_layers_of_1024_have_16_8_million_parameters_besides_the_vocabulary() -> None:
    with torch.device("meta"):
        model = LSTMLanguageModel(LSTMConfig(vocab_size=8192))
    assert sum(p.numel() for p in model.lstm.parameters()) == 2 * (8 * 1024**2 + 8 * 1024)
    # The head is the embedding: counted once, besides its bias.
    assert sum(p.numel() for p in model.parameters()) == 2 * (8 * 1024**2 + 8 * 1024) + 8192 * 1024 + 8192


def test_logits_follow_the_cells_equations() -> None:
    torch.manual_seed(0)
    model = LSTMLanguageModel(LSTMConfig(vocab_size=11, embed_dim=6)).double()
    tokens_BT = torch.randint(11, (3, 5))
    x_TBC = list(F.embedding(tokens_BT, model.embedding.weight).unbind(1))
    for layer in range(2):
        weights = [
            getattr(model.lstm, f"{name}_l{layer}")
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        ]
        h, c = torch.zeros(3, 6, dtype=torch.float64), torch.zeros(3, 6, dtype=torch.float64)
        for t, x in enumerate(x_TBC):
            gates = x @ weights[0].T + weights[2] + h @ weights[1].T + weights[3]
            i, f, g, o = gates.chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            x_TBC[t] = h
    expected = torch.stack(x_TBC, 1) @ model.embedding.weight.T + model.head.bias
    torch.testing.assert_close(model(tokens_BT), expected)


def test_the_loss_is_the_cross_entropy_of_the_logits_and_reaches_every_parameter() -> None:
    torch.manual_seed(0)
    model = LSTMLanguageModel(LSTMConfig(vocab_size=11, embed_dim=6))
    tokens_BT, targets_BT = torch.randint(11, (3, 5)), torch.randint(11, (3, 5))
    loss = model(tokens_BT, targets_BT)
    torch.testing.assert_close(loss, F.cross_entropy(model(tokens_BT).transpose(1, 2), targets_BT))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
