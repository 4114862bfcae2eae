"""What a pass is summed up to, how arms are compared, and when a figure may be quoted."""

import io

import pytest
from latency import RequestTimes, Slo
from measures import Measure, figures_of, ratios, serving_measures
from occupancy import StepSample
from replay import Counts, Replay
from rich.console import Console
from tables import print_table


def make_replay(slowness=1.0):
    """Two requests of two and one tokens, in two steps of a second each."""
    counts = Counts(
        steps=2,
        computed_tokens=12,
        hit_tokens=4,
        misses={},
        evictions=0,
        preemptions=1,
        traces=0,
        compilations=0,
        shapes_used=2,
        leaked_pages=0,
    )
    samples = (
        StepSample(0.0, slowness, 2, 0, 20, running=1, waiting=1, computed_tokens=10),
        StepSample(slowness, 2 * slowness, 2, 0, 28, running=2, waiting=0, computed_tokens=12),
    )
    requests = (RequestTimes(0.0, (slowness, 2 * slowness)), RequestTimes(0.0, (2 * slowness,)))
    return Replay(requests, ((1, 2), (3,)), samples, 2 * slowness, counts)


def make_measures(slowness=1.0):
    return serving_measures(make_replay(slowness), Slo(ttft_s=1.0, itl_s=1.0), tokens_per_page=16)


def test_a_pass_is_summed_up_as_by_hand():
    values = {name: measure.value for name, measure in make_measures().items()}
    assert values["ttft_p50"] == 1.0
    assert values["ttft_p99"] == 2.0
    assert values["itl_p50"] == 1.0
    assert values["output_throughput"] == 1.5
    assert values["request_throughput"] == 1.0
    assert values["goodput"] == 0.5
    assert values["slo_met"] == 0.5
    assert values["mean_running"] == 1.5
    assert values["waiting_share"] == 0.25
    assert values["step_time"] == 1.0
    assert values["tokens_per_step"] == 6.0
    assert values["page_overhead"] == pytest.approx(64 / 48)
    assert values["preemptions"] == 1


def test_arms_are_compared_pass_by_pass_and_not_where_the_other_is_zero():
    compared = ratios([make_measures(1.0), make_measures(2.0)], [make_measures(2.0)] * 2, ["ttft_p50", "leaked_pages"])
    assert compared == [{"ttft_p50": Measure(0.5, "ratio")}, {"ttft_p50": Measure(1.0, "ratio")}]


def figures(*slowness):
    return figures_of("serving.paged", [make_measures(each) for each in slowness], workload={}, dtype="float32")


def test_passes_that_disagree_make_a_figure_that_is_not_reportable_and_counts_that_are():
    measured = figures(1.0, 1.0, 1.5)
    assert measured["ttft_p50"].name == "serving.paged.ttft_p50"
    assert not measured["ttft_p50"].reportable
    assert measured["ttft_p50"].reason == "3 passes span 1 to 1.5 s, more than 20% of their median"
    assert measured["steps"].reportable
    assert figures(1.0, 1.0, 1.1)["ttft_p50"].reportable


def table_of(measured):
    out = io.StringIO()
    groups = {"latency": ["ttft_p50"], "memory": ["leaked_pages"], "absent": ["goodbye"]}
    print_table("a title", {"paged": measured}, groups, Console(file=out, width=100))
    return out.getvalue()


def test_the_table_marks_what_may_not_be_quoted():
    table = table_of(figures(1.0, 1.5))
    assert "a title" in table
    assert "ttft p50" in table
    assert "~ not reportable (" in table
    assert "~" in next(line for line in table.splitlines() if "ttft p50" in line)
    assert "~" not in next(line for line in table.splitlines() if "leaked pages" in line)
    assert "absent" not in table
    assert "~" not in table_of(figures(1.0, 1.0))


def test_the_table_writes_short_times_in_milliseconds():
    assert "250" in table_of(figures(0.25, 0.25))
    assert " ms" in table_of(figures(0.25, 0.25))
    assert " ms" not in table_of(figures(1.0, 1.0))
