"""What one site changes in a model: layers on the forwards of one or more modules."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fuseline.acceleration.layer import Layer
from fuseline.acceleration.rebound import Name, Rebound, StandIn


@dataclass(frozen=True)
class Change:
    """A site by its path and kind, and its layers; `name`: of the function that is stood in for."""

    path: str
    kind: str
    layers: tuple[tuple[nn.Module, Layer], ...]
    name: Name | None = None

    @property
    def counter(self) -> Layer | StandIn:
        """What counts how often Fuseline's op ran: the first layer, or its stand-in."""
        layer = self.layers[0][1]
        if self.name is None:
            return layer
        assert isinstance(layer, Rebound)
        return layer.stand_ins[self.name]
