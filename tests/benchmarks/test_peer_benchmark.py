"""Timelines become the numbers that they stand for, targets are met for the right reason, a missing peer is a line."""

import itertools
import json
import sys
from types import SimpleNamespace

import machine_limits
import peer_worker
import pytest
import run_peer_benchmark
from gguf_forms import ModelCosts
from machine_limits import FMA_CHAINS, FMA_ROUNDS, MATRIX, MachineLimits, compiled_loops
from peer_comparison import Comparison, Entrant, for_pass
from peer_process import PeerProcess
from peer_targets import Target, judge, limit_seconds, limits_of, measures_of
from peers import PeerError, shared_tokens
from random_llama import write_random_llama
from rich.console import Console
from workloads import TraceRequest, Workload

ONE = ModelCosts(weight_bytes=100, body_parameters=10, output_parameters=5, kv_bytes=2, attention_flops=3)


def request(prompt, tokens):
    return TraceRequest(0.0, tuple(range(prompt)), tokens)


def test_decode_is_measured_while_the_whole_batch_decodes():
    early, late = (0.5, 1.0, 2.0, 3.0), (1.0, 2.0, 3.0, 4.0)
    # From 1.0, when the last has its first token, to 3.0, when the first ends: two tokens each.
    assert measures_of("decode_b4", [request(3, 4)] * 2, [early, late])["rate"].value == 2.0


def test_a_decode_too_short_for_that_is_measured_to_its_end():
    assert measures_of("decode_b4", [request(3, 2)] * 2, [(0.5, 0.9), (1.0, 2.0)])["rate"].value == 1.0


def test_prefill_is_the_prompt_over_the_time_to_the_first_token():
    found = measures_of("prefill_512", [request(512, 1)], [(2.0,)])
    assert (found["rate"].value, found["ttft"].value) == (256.0, 2.0)


def test_a_trace_is_measured_from_its_submission():
    times = [(1.0, 4.0), (2.0, 3.0), (3.0, 5.0)]
    found = measures_of("trace", [request(3, 2)] * 3, times)
    assert {name: measure.value for name, measure in found.items()} == {
        "output_rate": 6 / 5.0,
        "total": 5.0,
        "ttft_p50": 2.0,
        "ttft_p90": 3.0,
    }


def test_the_least_time_is_that_of_the_operations_or_of_the_bytes():
    # A prompt of 4 and 2 answers: 5 tokens are computed, 2 of them have logits, they attend to 1 + 2 + 3 + 4 + 5.
    operations = 2 * 10 * 5 + 2 * 5 * 2 + 3 * 15
    assert limit_seconds([request(4, 2)], [0], ONE, bandwidth=1e9, flops=1) == operations
    # Two steps read the weights, and the second reads the K/V of 5 tokens.
    assert limit_seconds([request(4, 2)], [0], ONE, bandwidth=1, flops=1e9) == 2 * 100 + 2 * 5


def test_what_is_shared_is_computed_once_or_not_at_all_after_a_primer():
    requests = tuple(TraceRequest(0.0, (*range(40), 50 + own), 1) for own in range(2))
    seconds = [
        limits_of(name, Workload(requests, primer), ONE._replace(attention_flops=0), 1e9, 1)["total"]
        for name, primer in (("prefix", ()), ("prefix_primed", (request(40, 1),)))
    ]
    assert seconds == [2 * 10 * (41 + 1) + 2 * 5 * 2, 2 * 10 * 2 + 2 * 5 * 2]


def test_few_tokens_are_not_worth_sharing():
    assert shared_tokens(Workload((request(31, 1), request(35, 1)))) == 0
    assert shared_tokens(Workload((request(33, 1), request(35, 1)))) == 32
    assert shared_tokens(Workload((request(64, 1),))) == 0


FASTER = Target("faster", "decode_b1", "rate", "jaxkv.stored", "", 1.5)


def judged(target, ours, peers, limit=None):
    key = f"{target.workload}.{target.measure}"
    values = {"jaxkv.stored": {key: ours}, "jaxkv.float32": {key: 1e9}} | {
        name: {key: value} for name, value in peers.items()
    }
    return judge(target, values, {} if limit is None else {key: limit})


def test_a_target_is_met_by_its_ratio_to_the_best_peer_and_not_to_ourselves():
    line = judged(FASTER, 30.0, {"llama_cpp.stored": 20.0, "openvino.stored": 10.0})
    assert (line["met"], line["ratio"], line["peer"]) == (True, 1.5, "llama_cpp.stored")


def test_a_target_is_met_by_the_limit_of_the_machine():
    line = judged(FASTER, 20.0, {"llama_cpp.stored": 20.0}, limit=25.0)
    assert (line["met"], line["ratio"], line["fraction_of_limit"]) == (True, 1.0, 0.8)


def test_a_target_is_missed_with_its_numbers():
    line = judged(FASTER, 20.0, {"llama_cpp.stored": 20.0}, limit=26.0)
    assert (line["met"], line["needed"], line["value"], line["peer_value"]) == (False, 1.5, 20.0, 20.0)


def test_a_time_has_to_be_below_that_of_the_fastest():
    target = Target("sooner", "prefix", "total", "jaxkv.stored", "", 0.5, at_most=True)
    peers = {"llama_cpp.stored": 8.0, "openvino.stored": 4.0}
    assert judged(target, 2.0, peers)["met"]
    assert not judged(target, 3.0, peers)["met"]
    assert judged(target, 3.0, peers, limit=2.5)["fraction_of_limit"] == pytest.approx(2.5 / 3)


def test_a_target_without_peers_is_a_bound_of_its_own():
    target = Target("start", "startup", "warm", "jaxkv.stored", None, 2.0, at_most=True)
    assert judged(target, 1.9, {"llama_cpp.stored": 0.1})["met"]
    assert not judged(target, 2.1, {})["met"]


def test_a_target_is_open_without_a_peer_and_absent_without_us():
    assert judged(FASTER, 30.0, {})["met"] is None
    assert judge(FASTER, {"llama_cpp.stored": {"decode_b1.rate": 1.0}}, {}) is None


def test_the_workloads_are_what_their_names_say():
    workloads = run_peer_benchmark.read_workloads(run_peer_benchmark.WORKLOADS)
    assert set(workloads) == set(run_peer_benchmark.NAMES)
    for name, workload in workloads.items():
        kind, _, size = name.partition("_")
        if kind == "decode":
            assert len(workload.requests) == int(size[1:])
        if kind == "prefill":
            assert [len(asked.prompt) for asked in workload.requests] == [int(size)]
    assert [len(workloads[name].requests) for name in ("trace", "prefix", "prefix_primed")] == [32, 24, 24]
    assert shared_tokens(workloads["prefix"]) == shared_tokens(workloads["prefix_primed"]) == 512
    assert len(workloads["prefix_primed"].primer) == 1


def test_no_pass_finds_the_prompts_of_another_and_all_of_a_pass_still_share():
    workload = Workload((request(40, 64), request(50, 64)), (request(40, 1),))
    passes = [for_pass("decode_b4", workload, number, 48) for number in range(3)]
    assert [asked.requests[0].prompt[0] for asked in passes] == [0, 1, 2]
    assert [asked.requests[0].max_tokens for asked in passes] == [4, 48, 48]
    assert {shared_tokens(asked) for asked in passes} == {39}
    assert for_pass("trace", workload, 1, 48).requests[0].max_tokens == 64


def test_the_machine_reads_and_multiplies_by_every_method(monkeypatch):
    seconds = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(seconds), sleep=lambda _: None)  # a second for each
    monkeypatch.setattr(machine_limits, "time", clock)
    machine, loops = MachineLimits(threads=1), compiled_loops()
    methods = {"blas"} if loops is None else {"blas", "loop"}
    assert machine.read_bandwidth(1 << 20) == dict.fromkeys(methods, 1 << 30)
    found = machine.multiply_adds()
    assert set(found) == methods
    assert found["blas"] == 2 * MATRIX**3
    if loops is not None:
        assert found["loop"] == 2 * FMA_ROUNDS * FMA_CHAINS * loops.lane_count()
    narrow = machine.bf16_multiply_adds() | machine.int8_multiply_adds()
    assert all(value > found["loop"] for value in narrow.values())


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    return write_random_llama(tmp_path_factory.mktemp("tiny") / "tiny-random-llama", layers=2)


def test_jaxkv_answers_in_a_process_of_its_own(tiny_llama):
    workload = Workload((request(5, 3), request(9, 2)), (request(4, 1),))
    command = [sys.executable, peer_worker.__file__, "jaxkv.stored", str(tiny_llama), "--once"]
    process = PeerProcess(command)
    try:
        answer = process.run(workload)
    finally:
        process.close()
    assert [len(times) for times in answer["token_s"]] == [3, 2]
    assert all(times == sorted(times) and times[0] > 0 for times in answer["token_s"])
    assert answer["peak_resident_bytes"] > answer["about"]["parameter_bytes"] > 0


def worker(code):
    """A process that serves whatever `code` makes."""
    folder = str(run_peer_benchmark.MODEL.parents[2] / "benchmarks")
    lines = ["import sys", f"sys.path.insert(0, {folder!r})", "from peer_process import serve", code]
    return [sys.executable, "-c", "\n".join(lines)]


MISSING = worker("def make(only):\n import no_such_engine\nserve(make, once=False)")
DYING = worker("def make(only):\n raise RuntimeError('out of luck')\nserve(make, once=False)")


@pytest.mark.parametrize(
    ("command", "says"),
    [(MISSING, "no_such_engine is not installed"), (DYING, "ended with status 1: RuntimeError: out of luck")],
)
def test_an_engine_that_cannot_start_is_left_out_with_a_line(command, says, tmp_path, capsys):
    comparison = Comparison({"peer.stored": Entrant(command, tmp_path, True)}, 1, 100, Console(file=sys.stderr))
    comparison.start()
    comparison.measure("trace", Workload((request(5, 2),)))
    comparison.close()
    assert comparison.figures == {}
    printed = capsys.readouterr()
    assert says in json.loads(printed.out.splitlines()[0])["skipped"]
    assert "peer.stored is left out" in printed.err


def test_an_engine_that_is_killed_names_the_signal():
    process = PeerProcess(worker("import os; os.kill(os.getpid(), 9)"))
    try:
        with pytest.raises(PeerError, match="SIGKILL"):
            process.run(Workload((request(5, 2),)))
    finally:
        process.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--passes", "0"], "0 passes measure nothing"), (["--model", "nowhere.gguf"], "nowhere.gguf is missing")],
)
def test_what_cannot_be_measured_is_one_line(arguments, says, capsys):
    assert run_peer_benchmark.main(arguments) == 2
    assert says in capsys.readouterr().err
