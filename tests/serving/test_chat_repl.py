"""ChatRepl: history, its commands, and that Ctrl-C stops a reply and not the program."""

import io
import os
import signal
from collections.abc import Callable

import pytest
from serving_fakes import FakeBatcher, fake_model

from kv_execution import SamplingParams
from kv_serving.chat_repl import HELP, ChatRepl, interruptible


def typed(*lines: str | type[BaseException]) -> Callable[[], str]:
    """A reader of these lines; an exception class is raised in its place, and then the input ends."""
    rest = iter(lines)

    def read() -> str:
        line = next(rest, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read


def conversation(
    *lines: str | type[BaseException], replies: list[str], system: str | None = None, on_step: object = None
) -> tuple[ChatRepl, FakeBatcher, str]:
    batcher, out = FakeBatcher(replies, on_step=on_step), io.StringIO()
    params = SamplingParams(max_tokens=50)
    repl = ChatRepl(fake_model(), batcher, params, system=system, out=out, read_line=typed(*lines))
    repl.run()
    return repl, batcher, out.getvalue()


def prompts(batcher: FakeBatcher) -> list[str]:
    return ["".join(map(chr, ids)) for ids, _ in batcher.submitted]


def test_a_reply_is_streamed_and_the_next_prompt_holds_the_whole_conversation() -> None:
    _, batcher, shown = conversation("hi", "bye", replies=["hello", "so long"], system="be kind")
    assert shown == "hello\nso long\n"
    assert prompts(batcher) == [
        "system: be kind\nuser: hi",
        "system: be kind\nuser: hi\nassistant: hello\nuser: bye",
    ]


def test_reset_forgets_all_but_the_system_message() -> None:
    _, batcher, shown = conversation("hi", "/reset", "bye", replies=["a", "b"], system="be kind")
    assert prompts(batcher)[1] == "system: be kind\nuser: bye"
    assert "a new conversation begins" in shown


def test_exit_leaves_and_reads_nothing_more() -> None:
    _, batcher, _ = conversation("/exit", "never", replies=[])
    assert batcher.submitted == []


def test_an_empty_line_says_nothing_and_an_unknown_command_explains() -> None:
    _, batcher, shown = conversation("", "   ", "/what", replies=[])
    assert batcher.submitted == []
    assert shown == f"{HELP}\n"


def test_ctrl_c_at_the_prompt_explains_and_goes_on() -> None:
    _, batcher, shown = conversation(KeyboardInterrupt, "hi", replies=["hello"])
    assert shown == f"\n{HELP}\nhello\n"
    assert len(batcher.submitted) == 1


def test_ctrl_c_during_a_reply_stops_it_and_keeps_what_was_said() -> None:
    def press(batcher: FakeBatcher) -> None:
        if batcher.steps == 4:
            os.kill(os.getpid(), signal.SIGINT)

    repl, batcher, shown = conversation("hi", "more", replies=["a long answer", "ok"], on_step=press)
    assert batcher.aborted == [0]
    assert shown == "a l\nok\n"
    assert {"role": "assistant", "content": "a l"} in repl.messages


def test_a_refused_message_is_one_line_and_is_taken_back() -> None:
    repl, _, shown = conversation("x" * 200, "hi", replies=["hello"])
    assert shown.startswith("jaxkv: the prompt has 206 tokens")
    assert [message["content"] for message in repl.messages] == ["hi", "hello"]


def test_a_second_ctrl_c_gets_through_and_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible() as interrupted:  # noqa: PT012 (two signals are the subject)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
