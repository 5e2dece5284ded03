"""Profile the code inside a `with` block: `fuseline.profile`.

with fuseline.profile(model, optimizer) as p:
    train_step()
print(p)
p.save("my-profile")
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from fuseline.profiling import Profile, Session


def profile(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device: torch.device | str | None = None,
) -> Session:
    """Profile the code inside a `with` block as one step. Run the step a few times before, to warm up.

    To profile several steps, call `p.step()` after each.

    Args:
        model: the tables name places by its modules; without a model they show no places. A compiled model
            has places if it is compiled inside the block.
        optimizer: needed to tell the memory of its state from other memory.
        device: the device to profile; by default the model's, or a GPU if there is one.

    Returns a context manager. `with` yields it as `p`: `print(p)` shows the tables; `p.by_kind()`,
    `p.by_kernel()` and `p.gaps_by_place()` return their rows; `p.profile` holds everything; `p.save(folder)`
    writes a page, the traces for Perfetto and the records.
    """
    return Session(model, optimizer, device=device, write=_with_page)


def _with_page(taken: Profile, folder: Path) -> Path:
    from fuseline.report.profile import save  # draws with matplotlib, which takes its time to import

    return save(taken, folder)
