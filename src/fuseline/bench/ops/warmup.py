"""What the peers compile of ops, compiled by several processes before anything is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from fuseline.bench.compiling import Compilers, Task, one_task
from fuseline.bench.ops.bound import Computation, bind_inputs
from fuseline.bench.ops.plan import DTYPES, Place
from fuseline.bench.peers import PEERS, Peer
from fuseline.ops import get


class Warmup(Compilers):
    """Runs cases with the peers that compile."""

    def __init__(self, device: torch.device, jobs: int, seed: int) -> None:
        super().__init__(device, jobs)
        self.seed = seed

    def compile(
        self,
        places: Sequence[Place],
        peers: Sequence[Peer],
        observe: Callable[[int, int], None],
        within: float = math.inf,
    ) -> None:
        """Run every case of `places` once with every peer that compiles; see `Compilers.run`."""
        # Few rows first: at a sweep's lengths those are long ones, which compile longest, and beside numbers
        # of rows each length comes once before any comes twice, when its row-independent kernels are there.
        ordered = sorted(places, key=lambda place: place.rows)
        names = [peer.name for peer in peers if peer.compiles]
        self.run([self._task(place, name) for place in ordered for name in names], observe, within)

    def _task(self, place: Place, peer: str) -> Task:
        what = place.op.name, place.dtype_name, place.rows, place.n, peer, str(self.device), self.seed
        return Task(_compile, what, _room(place))


def _room(place: Place) -> int:
    """Bytes of one case: inputs, results, gradients of both, two fp32 copies."""
    return place.rows * place.n * (4 * place.dtype.itemsize + 8)


def _compile(op: str, dtype: str, rows: int, n: int, peer: str, device: str, seed: int) -> None:
    """One case, forward alone and forward with backward, as `measure_case` runs them."""
    import torch._functorch.config

    where = torch.device(device)
    place = Place(get(op), DTYPES[dtype], rows, n)
    with one_task(where), torch._functorch.config.patch("donated_buffer", False):
        _run_once(place, PEERS[peer], where, seed)


def _run_once(place: Place, peer: Peer, device: torch.device, seed: int) -> None:
    bound = bind_inputs(place.op, place.case, place.dtype, device, seed)
    Computation.of(peer, bound).forward_and_backward()
    dropless = bound.without_dropout()  # another kernel, that errors are taken of
    if dropless is not bound:
        Computation.of(peer, dropless).forward_and_backward()
    with torch.no_grad():
        Computation.of(peer, bound.without_gradients()).forward()
