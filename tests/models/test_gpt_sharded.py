"""FSDP2 frees the parameters of a block that is done. In its own process: it needs a process group."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

from fuseline.models.gpt import GPT, GPTConfig


def test_blocks_may_be_sharded_one_by_one(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path / "rendezvous")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _compare_with_one_that_is_whole(rendezvous: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    torch.manual_seed(0)
    sizes = {"block_size": 16, "vocab_size": 37, "num_layers": 3, "num_heads": 4, "embed_dim": 48}
    whole = GPT(GPTConfig(**sizes, norm="fuseline", loss="fuseline"))
    sharded = copy.deepcopy(whole)
    for block in sharded.transformer.h:
        fully_shard(block)
    fully_shard(sharded)
    ids = torch.randint(37, (3, 12))
    for model in (whole, sharded):
        model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).backward()
    for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    distributed.destroy_process_group()


if __name__ == "__main__":
    _compare_with_one_that_is_whole(sys.argv[1])
