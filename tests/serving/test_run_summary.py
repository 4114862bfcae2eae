"""The line about a finished run."""

from serving_fakes import PLAN, FakeBatcher, FakeEngine

from kv_execution import EngineConfig
from kv_serving.generation_run import RunReport
from kv_serving.run_summary import summary_line


def line(prompt_tokens: int, decode_tokens: int) -> str:
    report = RunReport(prompt_tokens, 0.5, decode_tokens, 2.0, decode_tokens + 1)
    return summary_line(report, PLAN, FakeEngine(EngineConfig(), FakeBatcher([])).stats())


def test_a_rate_is_told_of_enough_tokens_only() -> None:
    assert "prefill 20.0 tokens/s, decode 50.0 tokens/s;" in line(10, 100)
    assert "prefill of 3 tokens, decode of 2 tokens;" in line(3, 2)
    assert "prefill of 1 token, decode of no tokens;" in line(1, 0)
