"""Stop strings: found in any slicing of the text, never shown even in part, and nothing else is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_serving.stop_strings import StopStringError, StopStrings

LETTERS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> str:
    """Look at every prefix in turn: the first that ends in a stop string ends the text, without the longest such."""
    for end in range(len(text) + 1):
        matches = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(matches)]
    return text


def shown(pieces: list[str], stops: list[str]) -> str:
    stream = StopStrings(stops)
    text = "".join(stream.push(piece) for piece in pieces)
    return text if stream.found is not None else text + stream.finish()


@given(st.lists(LETTERS, max_size=6), STOPS)
def test_the_text_does_not_depend_on_how_it_was_cut(pieces: list[str], stops: list[str]) -> None:
    expected = naive("".join(pieces), stops)
    assert shown(pieces, stops) == expected
    assert shown(list("".join(pieces)), stops) == expected


@given(LETTERS, STOPS)
def test_what_was_shown_is_always_a_beginning_of_the_final_text(text: str, stops: list[str]) -> None:
    final, stream, so_far = naive(text, stops), StopStrings(stops), ""
    for letter in text:
        so_far += stream.push(letter)
        assert final.startswith(so_far)


def test_only_a_possible_beginning_is_held_back() -> None:
    stream = StopStrings(["</end>"])
    assert stream.push("one <") == "one "
    assert stream.push("/") == ""
    assert stream.push("b> two") == "</b> two"
    assert stream.push(" </end> three") == " "
    assert stream.found


def test_nothing_follows_a_stop_string() -> None:
    stream = StopStrings(["x"])
    assert stream.push("ax") == "a"
    assert stream.push("more") == ""
    assert stream.finish() == ""


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert StopStrings([]).push("text") == "text"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(StopStringError, match="a stop string is empty"):
        StopStrings(["a", ""])
