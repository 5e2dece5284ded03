"""Text of tokens as they come: what can be shown already, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\ufffd"  # what a decoder makes of a character whose bytes have not all come


class TextStream:
    """The text of one row. `add(tokens)` takes the next ones and returns what can be shown of them; `text` is
    all so far, cut before the first of `stops`, and `ended` says that one was met.

    A character whose last bytes are missing is held back, and so is what may be the beginning of a stop.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stop for stop in stops if stop)
        self._tokens: list[int] = []
        self._shown = 0
        self.text = ""
        self.ended = False

    def add(self, tokens: Sequence[int]) -> str:
        if self.ended or not len(tokens):
            return ""
        self._tokens.extend(tokens)
        self.text = self._decode(self._tokens)
        places = [self.text.find(stop) for stop in self._stops]
        met = [place for place in places if place >= 0]
        if met:
            self.ended = True
            self.text = self.text[: min(met)]
            return self._show(len(self.text))
        ready = self.text.rstrip(_UNFINISHED)
        return self._show(len(ready) - self._begun(ready))

    def close(self) -> str:
        """What was held back, now that nothing more comes."""
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        shown = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return shown

    def _begun(self, text: str) -> int:
        """Characters at the end that a stop may begin with."""
        for count in range(max((len(stop) - 1 for stop in self._stops), default=0), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops if len(text) >= count):
                return count
        return 0
