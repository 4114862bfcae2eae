"""Workloads are the same for the same seed, exact about what is shared, and refuse bad files in one line."""

import pytest
from workloads import (
    Lengths,
    TraceRequest,
    Workload,
    WorkloadError,
    closed_batch,
    poisson_arrivals,
    read_workload,
    shareable_tokens,
    shared_prefix,
)

LENGTHS = Lengths(prompt_tokens=40, output_tokens=8, vary=0.75)


def make_closed(seed=0, requests=20, lengths=LENGTHS):
    return closed_batch(requests, lengths, vocab_size=96, seed=seed)


def make_poisson(seed=0, rate=4.0):
    return poisson_arrivals(400, rate, LENGTHS, vocab_size=96, seed=seed)


def make_shared(seed=0):
    return shared_prefix(24, 512, 64, 16, vocab_size=96, seed=seed)


@pytest.mark.parametrize("make", [make_closed, make_poisson, make_shared])
def test_a_seed_names_one_workload(make):
    assert make(seed=3) == make(seed=3)
    assert make(seed=3) != make(seed=4)


def test_lengths_vary_within_their_bounds_and_reach_them():
    requests = make_closed(requests=400).requests
    prompts = {len(request.prompt) for request in requests}
    outputs = {request.max_tokens for request in requests}
    assert prompts == set(range(10, 41))
    assert outputs == set(range(2, 9))
    assert all(request.arrival_s == 0 for request in requests)


def test_lengths_that_do_not_vary_are_all_alike():
    requests = make_closed(lengths=LENGTHS._replace(vary=0.0)).requests
    assert {(len(request.prompt), request.max_tokens) for request in requests} == {(40, 8)}


def test_poisson_requests_are_those_of_the_closed_batch_and_come_at_the_rate_asked_for():
    poisson = make_poisson(rate=4.0).requests
    closed = closed_batch(400, LENGTHS, vocab_size=96, seed=0).requests
    assert [request._replace(arrival_s=0.0) for request in poisson] == list(closed)
    arrivals = [request.arrival_s for request in poisson]
    assert arrivals == sorted(arrivals)
    assert 400 / arrivals[-1] == pytest.approx(4.0, rel=0.15)
    assert arrivals != [request.arrival_s for request in make_poisson(seed=1).requests]


def test_a_shared_prefix_is_shared_to_the_token_and_no_further():
    workload = make_shared()
    prompts = [request.prompt for request in workload.requests]
    assert len({prompt[:512] for prompt in prompts}) == 1
    assert len({prompt[512] for prompt in prompts}) == 24
    assert {len(prompt) for prompt in prompts} == {576}
    assert shareable_tokens(workload) == 23 * 512


def test_shareable_counts_the_longest_common_beginning_with_any_earlier_prompt():
    prompts = [(1, 2, 3, 4), (1, 2, 9), (1, 2, 9, 9, 9), (5,), (1, 2, 3, 4)]
    requests = tuple(TraceRequest(0.0, prompt, 1) for prompt in prompts)
    # 0, then 2, then 3, then 0; and of a repeated prompt all but the token that is always computed.
    assert shareable_tokens(Workload(requests)) == 0 + 2 + 3 + 0 + 3
    assert shareable_tokens(Workload(requests[:2], primer=requests[:1])) == 3 + 2


def test_a_trace_file_is_read_in_the_order_of_arrival(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('[{"prompt": [1, 2], "max_tokens": 3, "arrival_s": 1.5}, {"prompt": [4], "max_tokens": 1}]')
    late, early = TraceRequest(1.5, (1, 2), 3), TraceRequest(0.0, (4,), 1)
    assert read_workload(path) == Workload((early, late))
    assert read_workload(path, first=1) == Workload((late,))
    assert read_workload(path).longest_context == 5


def test_a_trace_file_may_have_a_primer(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"primer": [{"prompt": [7], "max_tokens": 1}], "requests": [{"prompt": [7, 8], "max_tokens": 1}]}')
    assert read_workload(path) == Workload((TraceRequest(0.0, (7, 8), 1),), (TraceRequest(0.0, (7,), 1),))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "has no requests"),
        ('{"trace": []}', "has no requests"),
        ('{"requests": 3}', "requests is not a list"),
        ("[4]", "requests[0]: give"),
        ('[{"prompt": [1]}]', "requests[0]: give"),
        ('[{"prompt": [], "max_tokens": 1}]', "at least one token id"),
        ('[{"prompt": [1, -2], "max_tokens": 1}]', "at least one token id"),
        ('[{"prompt": [1, true], "max_tokens": 1}]', "at least one token id"),
        ('[{"prompt": [1], "max_tokens": 0}]', "max_tokens is 0"),
        ('[{"prompt": [1], "max_tokens": 1, "arrival_s": -1}]', "arrival_s is -1"),
        ('[{"prompt": [1], "max_tokens": 1, "arrival_s": NaN}]', "arrival_s is nan"),
    ],
)
def test_a_bad_trace_file_is_refused_in_one_line(tmp_path, content, says):
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(WorkloadError) as error:
        read_workload(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_trace_file_is_named(tmp_path):
    with pytest.raises(WorkloadError, match=r"nowhere\.json cannot be read \(No such file or directory\)"):
        read_workload(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: make_closed(requests=0), "requests is 0"),
        (lambda: make_closed(lengths=LENGTHS._replace(prompt_tokens=0)), "prompt_tokens is 0"),
        (lambda: make_closed(lengths=LENGTHS._replace(vary=1.0)), "vary by 1 of themselves"),
        (lambda: make_poisson(rate=0.0), "a rate of 0 requests"),
        (lambda: shared_prefix(97, 4, 4, 4, vocab_size=96, seed=0), "97 requests cannot all differ"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(make, says):
    with pytest.raises(WorkloadError, match=says):
        make()


def test_the_workloads_that_come_along_share_what_their_readme_says():
    from arms import DATA

    trace = read_workload(DATA / "smollm2_trace.json")
    assert len(trace.requests) == 32
    assert {len(request.prompt) for request in trace.requests} <= set(range(32, 513))
    prefix, primed = (read_workload(DATA / f"smollm2_{name}.json") for name in ("prefix", "prefix_primed"))
    assert [len(request.prompt) for request in prefix.requests] == [576] * 24
    assert shareable_tokens(prefix) >= 23 * 512
    assert shareable_tokens(primed) >= 12 * 512
