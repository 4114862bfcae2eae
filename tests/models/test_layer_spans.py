"""Layers of different kinds are cut into loops over periods."""

from hypothesis import given
from hypothesis import strategies as st

from models.layer_spans import LayerSpan, layer_spans


def test_layers_of_one_kind_are_one_loop_over_one_layer() -> None:
    assert layer_spans("a" * 30) == [LayerSpan(0, 30, ("a",))]


def test_layers_that_alternate_are_one_loop_over_a_period() -> None:
    assert layer_spans("wf" * 13) == [LayerSpan(0, 13, ("w", "f"))]


def test_trailing_layers_stand_outside() -> None:
    assert layer_spans("wwwwwf" * 4 + "ww") == [LayerSpan(0, 4, tuple("wwwwwf")), LayerSpan(24, 2, ("w",))]


def test_leading_layers_stand_outside() -> None:
    assert layer_spans("d" + "wf" * 3) == [LayerSpan(0, 1, ("d",)), LayerSpan(1, 3, ("w", "f"))]


def test_a_change_of_kind_in_the_middle_makes_two_loops() -> None:
    assert layer_spans("f" * 28 + "w" * 4) == [LayerSpan(0, 28, ("f",)), LayerSpan(28, 4, ("w",))]


@given(st.text("abc", max_size=12))
def test_spans_cover_every_layer_once_and_in_order(kinds: str) -> None:
    spans = layer_spans(kinds)
    assert [kind for span in spans for kind in span.period * span.repeats] == list(kinds)
    starts = [span.first for span in spans]
    assert starts == sorted(starts)
    assert all(span.first + span.repeats * len(span.period) <= len(kinds) for span in spans)
