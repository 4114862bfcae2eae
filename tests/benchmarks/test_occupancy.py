"""Page overhead and its company, by cases worked out by hand."""

import pytest
from occupancy import StepSample, mean_running, page_overhead, waiting_share


def make_sample(begin_s=0.0, end_s=1.0, *, pages=0, tokens=0, running=0, waiting=0):
    return StepSample(begin_s, end_s, pages, 0, tokens, running, waiting, computed_tokens=0)


def test_page_overhead_is_slots_over_tokens_summed_over_steps():
    samples = [make_sample(pages=2, tokens=20), make_sample(pages=3, tokens=40)]
    assert page_overhead(samples, tokens_per_page=16) == pytest.approx(80 / 60)


def test_a_shared_page_pays_a_dividend():
    # Three requests of 20 tokens: one page of 16 that all share, and one each for the last four.
    assert page_overhead([make_sample(pages=4, tokens=60)], tokens_per_page=16) == pytest.approx(64 / 60)
    # Of 36 tokens: two pages that all share.
    assert page_overhead([make_sample(pages=5, tokens=108)], tokens_per_page=16) == pytest.approx(80 / 108)


def test_full_pages_of_ones_own_are_no_overhead():
    assert page_overhead([make_sample(pages=2, tokens=32)], tokens_per_page=16) == 1.0


def test_nothing_held_is_no_overhead():
    assert page_overhead([make_sample()], tokens_per_page=16) == 0.0


def test_running_requests_are_averaged_over_busy_time():
    samples = [make_sample(0.0, 1.0, running=4), make_sample(5.0, 8.0, running=2)]
    assert mean_running(samples) == pytest.approx(10 / 4)


def test_the_waiting_share_is_the_part_of_all_requests_time_spent_in_the_queue():
    # Two requests at once, one of which waits for the first to end: 1 + 2 seconds of life, 1 of waiting.
    samples = [make_sample(0.0, 1.0, running=1, waiting=1), make_sample(1.0, 2.0, running=1)]
    assert waiting_share(samples, total_e2e_s=3.0) == pytest.approx(1 / 3)
