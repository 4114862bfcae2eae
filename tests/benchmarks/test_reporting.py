"""Figures say whether they may be quoted, and are one JSON line each."""

import io
import json

import pytest

from benchmarks.reporting import figure_from_passes, print_figure


def make_figure(passes, max_disagreement=0.1):
    return figure_from_passes(
        "step", passes, "us", workload={"requests": 4}, dtype="f32", threads=1, max_disagreement=max_disagreement
    )


def test_the_value_is_the_median_of_the_passes():
    figure = make_figure([10.0, 10.4, 10.1])
    assert figure.value == 10.1
    assert figure.repeats == 3
    assert figure.reportable


def test_passes_that_disagree_are_not_reportable_and_say_why():
    figure = make_figure([10.0, 14.0, 10.0])
    assert not figure.reportable
    assert figure.reason == "3 passes span 10 to 14 us, more than 10% of their median"


def test_a_single_pass_is_not_reportable():
    assert make_figure([10.0]).reason == "one pass has nothing to agree with"


def test_no_pass_at_all_is_an_error():
    with pytest.raises(ValueError, match="figure step has no passes"):
        make_figure([])


def test_a_figure_is_one_json_line_with_its_circumstances():
    out = io.StringIO()
    print_figure(make_figure([1.0, 1.0]), out)
    assert out.getvalue().count("\n") == 1
    line = json.loads(out.getvalue())
    assert line["spread"] == {"min": 1.0, "median": 1.0, "max": 1.0}
    assert line["workload"] == {"requests": 4}
    assert {"python", "numpy", "jaxkv"} <= line["versions"].keys()
    assert {"name", "value", "unit", "dtype", "threads", "repeats", "reportable", "reason"} <= line.keys()
