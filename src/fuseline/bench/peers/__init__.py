"""Who computes the same thing: one adapter a file, each turning an op's inputs into a differentiable call."""

from fuseline.bench.peers.eager import Eager
from fuseline.bench.peers.fuseline import Fuseline
from fuseline.bench.peers.inductor import Inductor
from fuseline.bench.peers.liger import Liger
from fuseline.bench.peers.peer import Peer, UnsupportedError
from fuseline.bench.peers.quack import Quack
from fuseline.errors import unknown_name

PEERS: dict[str, Peer] = {peer.name: peer for peer in (Fuseline(), Eager(), Inductor(), Liger(), Quack())}

__all__ = ["PEERS", "Peer", "UnsupportedError", "find_peers"]


def find_peers(names: tuple[str, ...]) -> tuple[Peer, ...]:
    """The peers of those names, each once, ours first."""
    for name in names:
        if name not in PEERS:
            raise unknown_name("peer", name, PEERS)
    return tuple(peer for peer in PEERS.values() if peer.name in names)
