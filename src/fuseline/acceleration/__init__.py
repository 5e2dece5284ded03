"""`fuseline.accelerate`: find in any model what Fuseline's ops can do, prove it, swap it, keep what pays.

observe.py    what each module is called with        trace.py     what it computes, as a graph
kinds/        what a graph is recognized as          probes.py    inputs to try it on
prove.py      outputs and gradients against float64  pay.py       original against swapped, in pairs
swap.py       what stands in a forward's place       study.py     all of it for one model and batch
handle.py     the handle that `accelerate` returns   table.py     what it prints
"""

from fuseline.acceleration.accelerate import accelerate
from fuseline.acceleration.handle import Acceleration
from fuseline.acceleration.site import Site

__all__ = ["Acceleration", "Site", "accelerate"]
