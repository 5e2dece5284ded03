"""What stands on a module's instance as its `forward`: layers, the lowest around the class's own.

A module stays what it is: its class, its parameters, their names, its hooks and its `state_dict` do not
change, and taking the layers out undoes all.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar, Self

from torch import nn
from torch.compiler import is_dynamo_compiling


class Layer(ABC):
    """One thing that is done around a module's forward, and how often it was done or left.

    Attributes:
        rank: layers of one module stand in this order, the lowest rank next to the class's own forward.
        strict: raise where the module's own code would run.
        taken, declined: calls that took Fuseline's op, and those that did not, with the reason.
    """

    rank: ClassVar[int]

    def __init__(self, module: nn.Module, strict: bool = False) -> None:
        self._module = weakref.ref(module)
        self.strict = strict
        self.inner: Layer | None = None
        self.taken = 0
        self.declined: Counter[str] = Counter()

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `module.forward(*args, **kwargs)` is to return."""

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module

    def original(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module would have done without this layer."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        module = self.module
        return type(module).forward(module, *args, **kwargs)

    def decline(self, reason: str) -> None:
        """Count a call that the original takes; `RuntimeError` where that must not be."""
        if not is_dynamo_compiling():
            self.declined[reason] += 1
        if self.strict:
            raise RuntimeError(
                f"{type(self.module).__name__} runs its own forward, not Fuseline's: {reason}. This raises "
                "because the model was accelerated with strict=True."
            )

    @abstractmethod
    def merge(self, other: Self) -> None:
        """Take over what another layer of this kind, found later for the same module, knows."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copied module's layer is the copy's: the copy is in the memo before its attributes are."""
        module = self.module
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        state = {
            name: copy.copy(value) if isinstance(value, (dict, set)) else value
            for name, value in self.__getstate__().items()
        }
        state["module"] = memo.get(id(module), module)
        state["inner"] = copy.deepcopy(self.inner, memo)
        twin.__setstate__(self.copied(state, memo))
        return twin

    def copied(self, state: dict[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
        """The state of a deep copy: a kind of layer that refers to other modules puts their copies in."""
        return state

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "module": self.module, "_module": None, "taken": 0, "declined": Counter()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        module = state.pop("module")
        self.__dict__.update(state)
        self._module = weakref.ref(module)


def layers_of(module: nn.Module) -> list[Layer]:
    """The layers of a module, the outermost first."""
    layer, found = module.__dict__.get("forward"), []
    while isinstance(layer, Layer):
        found.append(layer)
        layer = layer.inner
    return found


def put_in(module: nn.Module, layer: Layer) -> None:
    """Add a layer to the module's, in its place by rank."""
    _stand(module, [*layers_of(module), layer])


def take_out(module: nn.Module, layer: Layer) -> None:
    """Take one layer out; the module has its own forward back with the last of them."""
    _stand(module, [other for other in layers_of(module) if other is not layer])
    layer.inner = None


def _stand(module: nn.Module, layers: Iterable[Layer]) -> None:
    standing = module.__dict__.get("forward")
    if standing is not None and not isinstance(standing, Layer):
        warnings.warn(
            f"{type(module).__name__} was given a forward of its own after accelerate. It stays, and what it "
            "calls stays with it: take it away before undo().",
            stacklevel=4,
        )
        return
    top: Layer | None = None
    for layer in sorted(layers, key=lambda one: one.rank):
        layer.inner, top = top, layer
    if top is not None:
        module.__dict__["forward"] = top
    else:
        module.__dict__.pop("forward", None)
