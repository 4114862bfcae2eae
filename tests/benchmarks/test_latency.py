"""Percentiles, latencies and goodput, by cases worked out by hand."""

import pytest
from latency import RequestTimes, Slo, goodput, percentile


def test_a_percentile_is_a_value_that_was_measured():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert percentile(values, 50) == 3.0
    assert percentile(values, 90) == 5.0
    assert percentile(values, 20) == 1.0
    assert percentile(values, 21) == 2.0
    assert percentile([float(value) for value in range(1, 101)], 99) == 99.0
    assert percentile([7.0], 1) == 7.0


def test_the_percentile_of_nothing_is_zero():
    assert percentile([], 99) == 0.0


def test_times_count_from_arrival():
    times = RequestTimes(arrival_s=2.0, token_s=(3.5, 4.0, 6.0))
    assert times.ttft_s == 1.5
    assert times.itl_s == (0.5, 2.0)
    assert times.mean_itl_s == 1.25
    assert times.e2e_s == 4.0


def test_a_request_of_one_token_has_no_inter_token_latency():
    times = RequestTimes(0.0, (1.0,))
    assert times.itl_s == ()
    assert times.mean_itl_s == 0.0
    assert Slo(ttft_s=1.0, itl_s=0.0).is_met_by(times)


def test_goodput_counts_the_requests_that_met_both_limits():
    slo = Slo(ttft_s=1.0, itl_s=0.5)
    requests = [
        RequestTimes(0.0, (1.0, 1.5)),  # both, just
        RequestTimes(0.0, (1.1, 1.2)),  # first token late
        RequestTimes(0.0, (0.5, 1.1)),  # tokens apart
        RequestTimes(3.0, (3.5, 4.3, 4.5)),  # one long wait, made up for
    ]
    assert list(map(slo.is_met_by, requests)) == [True, False, False, True]
    assert goodput(requests, slo, duration_s=4.0) == pytest.approx(0.5)
