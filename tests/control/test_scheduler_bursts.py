"""Bursts: several decode steps of the same rows in one plan, where nobody has to be seen to meanwhile."""

import itertools

import numpy as np
import pytest
from scheduler_driver import PAGE, SchedulerDriver, prompt_of

from kv_control.scheduler import RequestTooLargeError


def bursting(usable_pages=40, *, most_steps=8, **options) -> SchedulerDriver:
    return SchedulerDriver(usable_pages=usable_pages, most_steps=most_steps, **options)


def steps_of(driver: SchedulerDriver) -> list[int]:
    return [plan.steps for plan in driver.plans]


def step_until_a_burst_is_in_flight(driver: SchedulerDriver) -> None:
    driver.step_until(lambda: driver.plans and driver.plans[-1].steps > 1)


def test_where_all_decode_and_nobody_waits_a_plan_is_of_several_steps():
    driver = bursting()
    requests = [driver.submit(prompt_of(3 + 2 * seed, seed), 13) for seed in range(3)]
    assert driver.step().steps == 1
    plan = driver.step()
    assert plan.steps == PAGE
    assert plan.request_ids.tolist() == requests
    assert plan.positions.tolist() == [4, 6, 8]
    assert np.diff(plan.table.query_start).tolist() == [PAGE] * 3
    assert plan.table.kv_len.tolist() == [7, 9, 11]
    driver.run()
    assert steps_of(driver) == [1, PAGE, PAGE, PAGE]
    assert [driver.computed[request] for request in requests] == [15, 17, 19]
    driver.assert_nothing_left()


@pytest.mark.parametrize("most_steps", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("new", [1, 2, 4, 5, 6, 14])
def test_a_burst_passes_neither_the_end_nor_a_page_of_tokens_nor_the_most_that_is_asked_for(new, most_steps):
    driver = bursting(most_steps=most_steps)
    request = driver.submit(prompt_of(3), new)
    driver.run()
    whole, rest = divmod(new - 1, min(most_steps, PAGE))
    assert steps_of(driver) == [1] + [min(most_steps, PAGE)] * whole + [rest] * (rest > 0)
    assert driver.computed[request] == 3 + new - 1
    driver.assert_nothing_left()


def test_a_burst_ends_where_the_first_of_its_rows_does():
    driver = bursting()
    for seed, new in enumerate((4, 6, 12)):
        driver.submit(prompt_of(3, seed), new)
    driver.run()
    assert [(plan.steps, len(plan.rows)) for plan in driver.plans] == [(1, 3), (3, 3), (2, 2), (4, 1), (2, 1)]
    driver.assert_nothing_left()


def test_a_burst_ends_where_the_context_does():
    driver = bursting(max_context=16)
    driver.scheduler.submit(7, prompt_of(10), max_new_tokens=50)
    plans = [driver.scheduler.schedule(most_steps=8) for _ in range(3)]
    assert [plan.steps for plan in plans] == [1, 4, 1]
    assert plans[-1].positions.tolist() == [15]
    assert driver.scheduler.schedule(most_steps=8) is None


def test_while_a_prompt_is_computed_steps_are_single_and_then_they_are_not():
    driver = bursting(max_step_tokens=8)
    first = driver.submit(prompt_of(3), 40)
    step_until_a_burst_is_in_flight(driver)
    late = driver.submit(prompt_of(30, 1), 9)
    begun = len(driver.plans)
    driver.step_until(lambda: driver.computed[late] == 30)
    assert steps_of(driver)[begun:] == [1] * 5
    assert all(plan.request_ids.tolist() == [first, late] for plan in driver.plans[begun:])
    assert driver.step().steps == PAGE
    driver.run()
    driver.assert_nothing_left()


def test_while_somebody_waits_steps_are_single():
    driver = bursting(max_requests=1)
    first, second = driver.submit(prompt_of(3), 9), driver.submit(prompt_of(3, 1), 9)
    driver.run(first)
    alone = [plan.steps for plan in driver.plans if plan.request_ids.tolist() == [first]]
    assert alone == [1] * 9
    driver.run()
    assert [plan.steps for plan in driver.plans if plan.request_ids.tolist() == [second]] == [1, 4, 4]
    driver.assert_nothing_left()


def test_a_request_that_comes_during_a_burst_is_in_the_next_plan():
    driver = bursting()
    driver.submit(prompt_of(3), 40)
    step_until_a_burst_is_in_flight(driver)
    late = driver.submit(prompt_of(5, 1), 3)
    assert late in driver.step().request_ids
    driver.run()


def test_where_pages_are_short_for_a_burst_alone_steps_are_single_until_there_are_more():
    driver = bursting(usable_pages=3)
    driver.submit(prompt_of(2), 6)
    driver.submit(prompt_of(5, 1), 1)  # holds two pages until its one token has come
    driver.run()
    assert steps_of(driver) == [1, 1, 4]
    assert driver.preemptions == []
    driver.assert_nothing_left()


def test_pages_that_only_the_cache_holds_make_room_for_bursts():
    driver = bursting(usable_pages=6)
    driver.run(driver.submit(prompt_of(9), 13))
    assert driver.allocator.cached_pages == 5
    second = driver.submit(prompt_of(3, 1), 13)
    driver.run()
    assert [plan.steps for plan in driver.plans if second in plan.request_ids] == [1, 4, 4, 4]
    driver.assert_nothing_left()


@pytest.mark.parametrize("usable_pages", [6, 7, 8, 9, 10, 11])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_bursts_cause_no_preemption(usable_pages, prefix_cache):
    preemptions, answers = {}, {}
    for most_steps in (1, 8):
        driver = bursting(usable_pages, most_steps=most_steps, prefix_cache=prefix_cache)
        for seed in range(2):
            driver.submit(prompt_of(6 + seed, seed), 14)
        driver.run()
        preemptions[most_steps], answers[most_steps] = driver.preemptions, driver.answers
        driver.assert_nothing_left()
    assert max(steps_of(driver)) > 1
    assert preemptions[8] == preemptions[1]
    assert (preemptions[1] == []) == (usable_pages >= 10)
    assert answers[8] == answers[1]


@pytest.mark.parametrize("stops_after", range(1, 12))
def test_a_stop_within_a_burst_drops_what_comes_after_it_and_frees_all(stops_after):
    driver = bursting()
    stopping = driver.submit(prompt_of(5), 20, ends_at=5 + stops_after)
    other = driver.submit(prompt_of(4, 1), 30)
    driver.run(stopping)
    assert driver.answers[stopping] == driver.expected[stopping].answer
    assert len(driver.answers[stopping]) == stops_after
    assert not driver.is_running(stopping)
    driver.run()
    assert len(driver.answers[other]) == 30
    assert driver.computed[stopping] <= 5 + stops_after - 1 + 2 * PAGE
    driver.assert_nothing_left()


def test_pages_of_one_that_stopped_within_a_burst_go_to_another_and_are_cleared_first():
    driver = bursting(usable_pages=6, prefix_cache=False)
    driver.submit(prompt_of(5), 18, ends_at=5 + 7)
    driver.run()
    driver.submit(prompt_of(9, 1), 15)
    driver.run()  # the driver fails where a page that is read was not cleared
    driver.assert_nothing_left()


@pytest.mark.parametrize("end", [SchedulerDriver.end, SchedulerDriver.preempt], ids=["abort", "preempt"])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_one_that_goes_while_a_burst_is_in_flight_disturbs_nobody(end, prefix_cache):
    driver = bursting(prefix_cache=prefix_cache, max_requests=2)
    going, staying = driver.submit(prompt_of(5), 30), driver.submit(prompt_of(6, 1), 30)
    step_until_a_burst_is_in_flight(driver)
    row = driver.row_of(going)
    end(driver, going)
    late = driver.submit(prompt_of(7, 2), 10)
    driver.step_until(lambda: driver.is_running(late))
    if end is SchedulerDriver.end:
        assert driver.row_of(late) == row
        assert driver.running.known_tokens(row, 0, 7).tolist() == prompt_of(7, 2).tolist()
        assert going not in driver.answers or len(driver.answers[going]) == 1
    driver.run()
    assert len(driver.answers[staying]) == 30
    assert driver.preemptions == [going] * (end is SchedulerDriver.preempt)
    driver.assert_nothing_left()


def test_a_preempted_request_knows_all_that_the_burst_gave_it():
    driver = bursting(prefix_cache=False)
    request = driver.submit(prompt_of(5), 30)
    step_until_a_burst_is_in_flight(driver)
    assert driver.preempt(request)
    assert len(driver.answers[request]) == 1 + PAGE
    driver.run()
    assert driver.computed[request] == 5 + 29 + (5 + PAGE)
    driver.assert_nothing_left()


def longest_in(usable_pages: int, **options) -> SchedulerDriver:
    """A driver whose pool is the smallest, from `usable_pages` on, that takes a generation of 100 tokens."""
    for pages in itertools.count(usable_pages):
        driver = bursting(pages, max_context=400, **options)
        try:
            driver.submit(prompt_of(5), 100)
        except RequestTooLargeError:
            continue
        return driver


@pytest.mark.parametrize("reach", [1, 2, 4, 5, 6, 9])
@pytest.mark.parametrize("max_step_tokens", [1, 8])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_behind_a_window_a_burst_gives_pages_back_and_the_smallest_pool_suffices(reach, max_step_tokens, prefix_cache):
    driver = longest_in(2, reach=reach, max_requests=1, max_step_tokens=max_step_tokens, prefix_cache=prefix_cache)
    driver.run()
    assert driver.computed[0] == 104
    assert driver.preemptions == []
    assert len(driver.content) - 1 < 10, "the pool was meant to hold a window"
    assert max(steps_of(driver)) == PAGE
    driver.assert_nothing_left()


@pytest.mark.parametrize("reach", [None, 6])
def test_pages_that_a_burst_filled_are_found_by_a_later_request(reach):
    computed = {}
    for most_steps in (1, 8):
        driver = bursting(most_steps=most_steps, reach=reach)
        first = driver.submit(prompt_of(5), 13)
        driver.run()
        whole = driver.expected[first].tokens
        second = driver.submit(np.append(whole[: 4 * PAGE], 0), 3)
        driver.run()
        computed[most_steps] = driver.computed[second]
        driver.assert_nothing_left()
    assert computed == {1: 3, 8: 3}


def test_pages_that_a_burst_filled_are_found_while_it_goes_on():
    driver = bursting()
    first = driver.submit(prompt_of(5), 30)
    driver.step_until(lambda: len(driver.answers.get(first, ())) >= 9)
    second = driver.submit(driver.expected[first].tokens[: 5 + 8], 9)
    driver.run()
    assert driver.computed[second] == 5 + 8 - 3 * PAGE + 8
    driver.assert_nothing_left()


def test_equal_pages_that_bursts_compute_twice_are_merged():
    driver = bursting()
    twins = [driver.submit(prompt_of(6), 20, read_cache=False) for _ in range(2)]
    driver.step_until(lambda: len(driver.answers.get(twins[1], ())) >= 13)
    shared = set(driver.pages_of(twins[0])) & set(driver.pages_of(twins[1]))
    assert len(shared) >= (6 + 13 - 1) // PAGE - 1
    driver.run()
    assert driver.answers[twins[0]] == driver.answers[twins[1]]
    driver.assert_nothing_left()


def test_a_fork_of_a_request_in_a_burst_decodes_in_bursts_beside_it():
    driver = bursting()
    parent = driver.submit(prompt_of(6), 24)
    step_until_a_burst_is_in_flight(driver)
    child = driver.fork(parent, 12)
    driver.run()
    assert any(plan.steps > 1 and len(plan.rows) == 2 for plan in driver.plans)
    assert driver.answers[child] == driver.answers[parent][:12]
    driver.assert_nothing_left()


def test_held_requests_are_in_no_burst_and_move_between_them():
    driver = bursting()
    held = driver.hold(prompt_of(6, 1), 9)
    driver.step_held([held])
    queued = driver.submit(prompt_of(3), 30)
    step_until_a_burst_is_in_flight(driver)
    for _ in range(4):
        plan = driver.step()
        assert plan.request_ids.tolist() == [queued]
        assert plan.steps == PAGE
        assert driver.step_held([held]).steps == 1
    assert driver.answers[held] == driver.expected[held].answer[:5]
    driver.run()
    driver.end(held)
    driver.assert_nothing_left()


@pytest.mark.parametrize("reach", [None, 6])
@pytest.mark.parametrize("seed", range(4))
def test_a_random_trace_gives_every_request_its_tokens_and_ages_as_single_steps_do(seed, reach):
    rng = np.random.default_rng(seed)
    driver = bursting(usable_pages=24, reach=reach, max_step_tokens=8, most_steps=int(rng.integers(2, 9)))
    for _ in range(30):
        new = int(rng.integers(1, 20))
        prompt = prompt_of(int(rng.integers(1, 20)), int(rng.integers(3)))
        stops_at = len(prompt) + int(rng.integers(1, new + 1))
        driver.submit(prompt, new, ends_at=stops_at, priority=int(rng.integers(2)))
        for _ in range(int(rng.integers(0, 6))):
            driver.step()
    driver.run()
    assert driver.scheduler._steps == sum(steps_of(driver))
    assert max(steps_of(driver)) > 1
    driver.assert_nothing_left()
