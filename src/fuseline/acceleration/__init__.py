"""`fuseline.accelerate`: find in any model what Fuseline's ops can do, prove it, swap it, keep what pays.

observe.py    what each module is called with        trace.py     what it computes, as a graph
flow.py       which modules' outputs a sum is of     kinds/       what a graph is recognized as
probes.py     inputs to try it on                    prove.py     outputs and gradients against float64
pay.py        original against swapped, in pairs     judge.py     proved, timed, kept or left
layer.py      what stands on a module's `forward`    swap.py      a recipe in the forward's place
sum_norm.py   who waits for which sum                norm_ahead.py  a norm computed with its sum
rebound.py    other functions in a forward           rotary.py    tables, and who turns by them
study.py      all of it for one model and batch      rehearse.py  whether the batch makes use of it
handle.py     the handle that `accelerate` returns   table.py     what it prints
lengths.py    the length at which a batch runs       padding_proof.py  whether padding to it shows
"""

from fuseline.acceleration.accelerate import accelerate
from fuseline.acceleration.handle import Acceleration
from fuseline.acceleration.site import Site

__all__ = ["Acceleration", "Site", "accelerate"]
