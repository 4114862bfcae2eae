"""Views: answers come out whole and in order, whatever order their pieces come in."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kv_serving.output_view import LiveView, OrderedView, choose_view


def terminal(height: int = 24) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=40, height=height, _environ={"TERM": "xterm"})


def test_one_prompt_streams_bare() -> None:
    out = io.StringIO()
    with OrderedView(out, None) as view:
        view.write(0, "Hel")
        assert out.getvalue() == "Hel"
        view.write(0, "lo")
        view.finish(0)
    assert out.getvalue() == "Hello\n"


def test_the_first_unfinished_answer_streams_and_later_ones_wait() -> None:
    out = io.StringIO()
    with OrderedView(out, ["one?", "two?"]) as view:
        view.write(1, "second")
        view.write(0, "fir")
        assert out.getvalue() == "== one?\nfir"
        view.finish(1)
        view.write(0, "st")
        view.finish(0)
    assert out.getvalue() == "== one?\nfirst\n\n== two?\nsecond\n"


@given(st.lists(st.integers(0, 3), max_size=30), st.permutations(range(4)))
def test_the_blocks_do_not_depend_on_the_order_of_pieces(writes: list[int], finishes: list[int]) -> None:
    out, expected = io.StringIO(), [""] * 4
    with OrderedView(out, ["0", "1", "2", "3"]) as view:
        for number, index in enumerate(writes):
            view.write(index, f"{number} ")
            expected[index] += f"{number} "
        for index in finishes:
            view.finish(index)
    assert out.getvalue() == "\n".join(f"== {index}\n{text}\n" for index, text in enumerate(expected))


def test_a_live_view_leaves_the_same_blocks_behind() -> None:
    console, out = terminal(), io.StringIO()
    with LiveView(console, out, ["one?", "two?"]) as view:
        view.write(1, "second")
        view.write(0, "first")
        view.finish(1)
        view.finish(0)
    assert out.getvalue() == "== one?\nfirst\n\n== two?\nsecond\n"
    assert "second" in console.file.getvalue()


def test_a_live_view_never_outgrows_the_screen() -> None:
    console = terminal(height=10)
    view = LiveView(console, io.StringIO(), ["one?", "two?", "three?"])
    for index in range(3):
        view.write(index, "line\n" * 50)
    lines = console.render_lines(view._render(), pad=False)
    assert len(lines) < 10


def test_several_prompts_are_shown_live_only_where_the_screen_has_room() -> None:
    pipe = Console(file=io.StringIO(), width=80)
    assert isinstance(choose_view(terminal(), io.StringIO(), ["a", "b"]), LiveView)
    assert isinstance(choose_view(terminal(), io.StringIO(), ["a"] * 20), OrderedView)
    assert isinstance(choose_view(terminal(), io.StringIO(), ["a"]), OrderedView)
    assert isinstance(choose_view(pipe, io.StringIO(), ["a", "b"]), OrderedView)
