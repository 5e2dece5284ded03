"""Who computes the same thing: one adapter a file, each turning an op's inputs into a differentiable call."""

from fuseline.bench.peers.apex import Apex
from fuseline.bench.peers.eager import Eager
from fuseline.bench.peers.fuseline import Fuseline
from fuseline.bench.peers.inductor import MAX_AUTOTUNE, Inductor
from fuseline.bench.peers.liger import Liger
from fuseline.bench.peers.peer import Peer, UnsupportedError
from fuseline.bench.peers.quack import Quack
from fuseline.bench.peers.transformer_engine import TransformerEngine
from fuseline.errors import unknown_name

_ALL: tuple[Peer, ...] = (
    Fuseline(),
    Eager(),
    Inductor(),
    MAX_AUTOTUNE,
    Liger(),
    Quack(),
    Apex(),
    TransformerEngine(),
)
PEERS: dict[str, Peer] = {peer.name: peer for peer in _ALL}

__all__ = ["PEERS", "Peer", "UnsupportedError", "find_peers"]


def find_peers(names: tuple[str, ...]) -> tuple[Peer, ...]:
    """The peers of those names, each once, ours first."""
    for name in names:
        if name not in PEERS:
            raise unknown_name("peer", name, PEERS)
    return tuple(peer for peer in PEERS.values() if peer.name in names)
