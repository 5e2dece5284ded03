"""A training step asks for no cache of keys and values.

Decoders of `transformers` fill a cache in every call unless they are told not to. It copies the keys and
values of each layer, and the gradients are copied back. A step that takes nothing but the loss from the
output has no use for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

OPTION, GIVEN = "use_cache", "past_key_values"


def without_cache(model: nn.Module, batch: Any) -> Any:
    """The batch, with `use_cache=False` where the model would make a cache and nobody said anything of it."""
    if not isinstance(batch, Mapping) or OPTION in batch or batch.get(GIVEN) is not None:
        return batch
    if not getattr(getattr(model, "config", None), OPTION, False):
        return batch
    takes_it = OPTION in inspect.signature(type(model).forward).parameters
    return {**batch, OPTION: False} if takes_it else batch
