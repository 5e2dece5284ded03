"""Text as it comes: whole characters only, nothing of a stop string, the same text in the end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from fuseline.generation.stopping import TextStream


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


@pytest.mark.parametrize("stops", [(), ("END",), ("nowhere", "über b")])
def test_what_is_shown_is_the_text_up_to_the_stop(stops: tuple[str, ...]) -> None:
    text = "Grüße 🙂 EN E über bord END and more"
    ends = [text.find(stop) for stop in stops if stop in text]
    expected = text[: min(ends)] if ends else text
    draw = random.Random(0)
    for _ in range(50):
        stream, shown, tokens = TextStream(decode, stops), "", list(text.encode())
        while tokens:
            count = draw.randint(1, 4)
            part = stream.add(tokens[:count])
            shown, tokens = shown + part, tokens[count:]
            assert expected.startswith(shown)
        shown += stream.close()
        assert shown == stream.text == expected
        assert stream.ended == bool(ends)


def test_characters_that_never_end_are_shown_at_the_end() -> None:
    stream = TextStream(decode)
    assert stream.add(list("aü".encode())[:-1]) == "a"
    assert stream.close() == "\ufffd"
