"""Profile what stands inside a `with` block: `fuseline.profile`.

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
    """Profile the block as one step, or as several with `p.step()` after each. Warm up first.

    Args:
        model: names the places in the tables by its modules; None: they are not known. Of a compiled model
            the places are known if it is compiled inside the block.
        optimizer: tells the memory of its state apart.
        device: what is profiled: that of the model, else a GPU if there is one.

    What `with` yields has the tables as text (`print(p)`), as rows (`p.by_kind()`, `p.by_kernel()`,
    `p.gaps_by_place()`), all of it as `p.profile`, and `p.save(folder)`, which writes a page, the traces for
    Perfetto and the records.
    """
    return Session(model, optimizer, device=device, write=_with_page)


def _with_page(taken: Profile, folder: Path) -> Path:
    from fuseline.report.profile import save  # draws with matplotlib, which takes its time to import

    return save(taken, folder)
