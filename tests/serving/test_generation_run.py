"""run_jobs: text arrives whole and in order, stop strings end a request, and the report counts what it says."""

import pytest
from serving_fakes import FakeBatcher, LetterTokenizer, TooLongError, fake_model

from kv_execution import SamplingParams
from kv_serving.generation_run import Job, run_jobs
from kv_serving.session import make_job
from kv_serving.stop_strings import StopStrings
from kv_serving.text_assembly import TextAssembly
from models import StreamDecoder


class Recorder:
    """Keeps what each job wrote and the order in which they finished."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[str]] = {}
        self.finished: list[int] = []

    def write(self, index: int, piece: str) -> None:
        self.pieces.setdefault(index, []).append(piece)

    def finish(self, index: int) -> None:
        self.finished.append(index)


def job(prompt: str = "ask", stops: tuple[str, ...] = (), max_tokens: int = 50) -> Job:
    return make_job(fake_model(), [ord(letter) for letter in prompt], SamplingParams(max_tokens=max_tokens), stops)


def test_text_streams_as_it_is_generated_and_the_end_token_is_no_text() -> None:
    jobs, sink = [job()], Recorder()
    report = run_jobs(FakeBatcher(["hello"]), jobs, sink)
    assert sink.pieces[0] == ["h", "e", "l", "l", "o", ""]
    assert jobs[0].text == "hello"
    assert jobs[0].finish_reason == "stop"
    assert report.generated_tokens == 6


def test_every_job_gets_its_own_text() -> None:
    jobs, sink = [job(), job(), job()], Recorder()
    run_jobs(FakeBatcher(["one", "three", "x"]), jobs, sink)
    assert [each.text for each in jobs] == ["one", "three", "x"]
    assert sink.finished == [2, 0, 1]


def test_a_stop_string_aborts_its_request_and_no_other() -> None:
    jobs, batcher = [job(stops=("END",)), job(stops=("END",))], FakeBatcher(["said END and more", "EN route"])
    run_jobs(batcher, jobs, Recorder())
    assert [each.text for each in jobs] == ["said ", "EN route"]
    assert [each.finish_reason for each in jobs] == ["stop", "stop"]
    assert batcher.aborted == [0]


def test_text_held_back_for_a_stop_string_is_shown_when_the_answer_ends() -> None:
    jobs = [job(stops=("END",), max_tokens=4)]
    run_jobs(FakeBatcher(["a EN..."]), jobs, Recorder())
    assert jobs[0].text == "a EN"
    assert jobs[0].finish_reason == "length"


def test_a_character_cut_by_the_end_is_flushed_through_the_stop_strings() -> None:
    class Late(StreamDecoder):
        def feed(self, ids: object) -> str:
            return ""

        def finish(self) -> str:
            return "late END tail"

    jobs = [Job([1], SamplingParams(max_tokens=2), TextAssembly(Late(LetterTokenizer()), StopStrings(["END"])))]
    run_jobs(FakeBatcher(["abc"]), jobs, Recorder())
    assert jobs[0].text == "late "
    assert jobs[0].finish_reason == "stop"


def test_prefill_and_decode_are_counted_apart() -> None:
    report = run_jobs(FakeBatcher(["ab", "abcd"]), [job("12345"), job("678")], Recorder())
    assert report.prompt_tokens == 8
    assert report.generated_tokens == 3 + 5
    assert report.decode_tokens == 2 + 4  # every token but the two first ones
    assert report.prefill_s > 0
    assert report.decode_s > 0


def test_an_interruption_between_steps_aborts_what_is_left() -> None:
    jobs, batcher, sink = [job(), job()], FakeBatcher(["ab", "a long answer"]), Recorder()
    run_jobs(batcher, jobs, sink, interrupted=lambda: batcher.steps == 5)
    assert [each.finish_reason for each in jobs] == ["stop", "abort"]
    assert batcher.aborted == [1]
    assert jobs[1].text == "a lo"
    assert sink.finished == [0, 1]
    assert not batcher.has_unfinished


def test_a_refused_prompt_raises_the_engines_own_error() -> None:
    with pytest.raises(TooLongError, match="the prompt has 200 tokens"):
        run_jobs(FakeBatcher(["x"]), [job("x" * 200)], Recorder())
