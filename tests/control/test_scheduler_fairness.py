"""Too few pages, too few rows, priorities: everyone finishes, nobody is passed over for ever, nobody spins."""

import numpy as np
import pytest
from scheduler_driver import PAGE, SchedulerDriver, prompt_of

from kv_control.queue import AGING_STEPS, LOOK_PAST, MAX_TIMES_PASSED


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_four_requests_in_a_pool_for_one_and_a_half_all_finish_in_as_many_steps_as_one_after_the_other(prefix_cache):
    driver = SchedulerDriver(usable_pages=15, prefix_cache=prefix_cache)
    requests = [driver.submit(prompt_of(13, seed), 27) for seed in range(4)]
    assert driver.run() <= 4 * (27 + 3)
    assert driver.preemptions
    assert all(driver.preemptions.count(request_id) <= 3 for request_id in requests)
    driver.assert_nothing_left()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("tokens", range(4 * PAGE - 3, 4 * PAGE + 5))
def test_a_pool_for_exactly_one_request_runs_one_after_the_other_whatever_they_share(tokens, prefix_cache):
    for new_tokens in (1, 2, PAGE + 1):
        needed = -(-(tokens + new_tokens - 1) // PAGE)
        driver = SchedulerDriver(usable_pages=needed, prefix_cache=prefix_cache)
        for seed in (1, 1, 2, 1, 1):
            driver.submit(prompt_of(tokens, seed), new_tokens)
        driver.run()  # fails as soon as nothing can go on
        driver.submit(prompt_of(tokens, 1), new_tokens)
        driver.run()
        driver.assert_nothing_left()


def test_a_pool_full_of_the_very_pages_that_a_request_hits_does_not_count_them_twice():
    driver = SchedulerDriver(usable_pages=8)
    driver.submit(prompt_of(4 * PAGE, 1), 1)
    driver.run()
    held = driver.hold(prompt_of(4 * PAGE, 2))
    driver.step_held([held])
    assert (driver.free_pages, driver.allocator.cached_pages) == (0, 4)
    hitting = driver.submit(prompt_of(5 * PAGE, 1), 4)
    before = driver.books()
    assert driver.step() is None
    assert driver.books() == before
    driver.end(held)
    driver.run(hitting)
    assert driver.computed[hitting] == PAGE + 3
    driver.assert_nothing_left()


def test_a_pool_for_one_request_that_is_cached_to_its_last_token_recomputes_a_page_rather_than_wait_for_ever():
    driver = SchedulerDriver(usable_pages=4)
    for _ in range(2):
        driver.submit(prompt_of(4 * PAGE), 1)
        driver.run()
    assert driver.computed == {0: 4 * PAGE, 1: PAGE}
    held = driver.hold(prompt_of(4 * PAGE), 1)
    driver.step_held([held])
    assert driver.computed[held] == PAGE
    driver.end(held)
    driver.assert_nothing_left()


@pytest.mark.parametrize("before", [0, 1, 7, 50])
def test_one_huge_and_fifty_small_requests_all_finish(before):
    driver = SchedulerDriver(usable_pages=16)
    small = [driver.submit(prompt_of(5, seed), 4) for seed in range(before)]
    huge = driver.submit(prompt_of(50, 99), 13)
    small += [driver.submit(prompt_of(5, seed), 4) for seed in range(before, 50)]
    driver.run(at_most=50 * 5 + 30)
    passed = [request_id for request_id in driver.admissions[: driver.admissions.index(huge)] if request_id > huge]
    assert len(passed) <= MAX_TIMES_PASSED
    driver.assert_nothing_left()


@pytest.mark.parametrize("max_requests", [3, 16])
def test_a_huge_request_is_passed_a_bounded_number_of_times_by_an_endless_stream_of_small_ones(max_requests):
    driver = SchedulerDriver(usable_pages=38, max_requests=max_requests, max_step_tokens=64, max_context=160)
    stream = iter(range(100, 10_000))

    def submit_small():
        seed = next(stream)
        return driver.submit(prompt_of(5, seed), 2 + seed % 5)

    for _ in range(max_requests):
        submit_small()
    driver.step()
    huge = driver.submit(prompt_of(148, 1), 4)
    came = driver.steps
    arrivals = {}
    while not driver.is_running(huge):
        for _ in range(2 * max_requests - driver.scheduler.num_waiting):
            arrivals[submit_small()] = driver.steps
        driver.step()
        assert driver.steps < 400
    passed = [request_id for request_id in driver.admissions if request_id > huge]
    # Those that come while its prompt alone would take the steps' budgets, 148 tokens of 64, have an earlier turn.
    assert len([request_id for request_id in passed if arrivals[request_id] - came > 2]) == MAX_TIMES_PASSED
    assert len(passed) < MAX_TIMES_PASSED + 3 * 2 * max_requests
    driver.run()
    driver.assert_nothing_left()


def test_a_request_that_does_not_fit_keeps_only_what_is_beyond_the_look_past_waiting():
    # A budget that would take both small requests in one step, so that only their place in the queue parts them.
    driver = SchedulerDriver(usable_pages=16, max_step_tokens=32)
    driver.submit(prompt_of(30, 1), 10)
    driver.step()
    free_rows = driver.residency.request_map.free_rows
    for seed in range(free_rows + LOOK_PAST - 1):
        driver.submit(prompt_of(50, 50 + seed), 4)
    driver.step()
    driver.step()  # or the small ones would have an earlier turn than the large ones
    in_reach, beyond = driver.submit(prompt_of(2, 2), 4), driver.submit(prompt_of(2, 3), 4)
    driver.step()
    assert driver.is_running(in_reach)
    assert not driver.is_running(beyond)
    driver.run()


def test_a_full_batch_takes_the_next_request_as_soon_as_a_row_is_free():
    driver = SchedulerDriver(usable_pages=60, max_requests=2)
    for seed in range(8):
        driver.submit(prompt_of(3, seed), 3)
    driver.run()
    started = [driver.first_step[request_id] for request_id in range(8)]
    # Three tokens are three steps.
    assert started == [0, 0, 3, 3, 6, 6, 9, 9]


def test_two_equal_requests_in_a_pool_for_one_preempt_at_most_once():
    for prompt_len in range(1, 4 * PAGE):
        driver = SchedulerDriver(usable_pages=10, prefix_cache=bool(prompt_len % 2))
        requests = [driver.submit(prompt_of(prompt_len, seed), 40 - prompt_len) for seed in range(2)]
        driver.run()
        assert len(driver.preemptions) <= 1
        assert requests[0] not in driver.preemptions
        driver.assert_nothing_left()


def test_equal_priorities_never_preempt_a_request_twice_in_a_row_unless_one_of_them_left_in_between():
    rng = np.random.default_rng(0)
    preemptions = 0
    for _ in range(25):
        driver = SchedulerDriver(usable_pages=int(rng.integers(16, 24)), prefix_cache=bool(rng.integers(2)))
        for _ in range(8):
            driver.submit(prompt_of(int(rng.integers(1, 40)), int(rng.integers(4))), int(rng.integers(1, 24)))
            driver.step()
        driver.run()
        for left_before in driver.left_before.values():
            assert (np.diff(left_before) > 0).all()
        preemptions += len(driver.preemptions)
        driver.assert_nothing_left()
    assert preemptions > 10


def test_an_equal_priority_preempts_nobody_in_order_to_start():
    driver = SchedulerDriver(usable_pages=10, max_requests=2)
    running = [driver.submit(prompt_of(8, seed), 8, priority=1) for seed in range(2)]
    driver.step()
    late = driver.submit(prompt_of(8, 5), 4, priority=1)
    driver.run()
    assert driver.preemptions == []
    assert driver.admissions == [*running, late]


@pytest.mark.parametrize("short_of", ["rows", "pages"])
def test_a_strictly_higher_priority_pushes_out_the_newest_of_the_lower_ones(short_of):
    options = {"max_requests": 3} if short_of == "rows" else {"usable_pages": 12}
    driver = SchedulerDriver(**{"usable_pages": 30, "max_requests": 4, **options})
    low = [driver.submit(prompt_of(11, seed), 4, priority=-1) for seed in range(3)]
    driver.step()
    driver.step()
    urgent = driver.submit(prompt_of(11, 9), 4)
    driver.step_until(lambda: driver.is_running(urgent), at_most=2)
    assert driver.preemptions == [low[2]]
    driver.run()
    assert driver.admissions == [*low, urgent, low[2]]
    driver.assert_nothing_left()


def test_nobody_is_pushed_out_where_that_would_not_be_enough():
    driver = SchedulerDriver(usable_pages=15)
    driver.submit(prompt_of(23, 1), 12, priority=5)
    driver.submit(prompt_of(11, 2), 8, priority=-1)
    driver.step_until(lambda: len(driver.answers) == 2)
    large = driver.submit(prompt_of(39, 3), 4)
    for _ in range(4):
        driver.step()
    assert driver.preemptions == []
    assert not driver.is_running(large)
    driver.run()
    driver.assert_nothing_left()


def test_nobody_is_pushed_out_for_pages_that_the_urgent_request_would_only_share():
    driver = SchedulerDriver(usable_pages=15)
    shared = prompt_of(6 * PAGE + 1, 1)
    driver.submit(prompt_of(6 * PAGE + 1, 2), 12, priority=5)
    low = driver.submit(shared, 12, priority=-1)
    driver.step_until(lambda: len(driver.answers) == 2)
    # It hits 6 pages of the low one's 7, and needs 5 more of the 3 that there would be without it.
    urgent = driver.submit(np.append(shared, prompt_of(18, 3)), 1)
    for _ in range(5):
        driver.step()
        assert driver.is_running(low)
    assert driver.preemptions == []
    driver.run(urgent)
    driver.run()
    driver.assert_nothing_left()


def test_nobody_is_pushed_out_for_a_page_that_would_only_be_copied():
    driver = SchedulerDriver(usable_pages=6)
    driver.submit(prompt_of(4 * PAGE, 1), 1)
    driver.run()
    low = driver.submit(prompt_of(5, 2), 4, priority=-1)
    driver.step()
    urgent = driver.submit(prompt_of(4 * PAGE, 1), 1)
    driver.step()
    assert driver.is_running(urgent)
    driver.run()
    assert driver.preemptions == []
    assert driver.admissions == [0, low, urgent]


def test_lower_requests_that_share_their_pages_are_pushed_out_together():
    driver = SchedulerDriver(usable_pages=12)
    first = driver.submit(prompt_of(8 * PAGE + 1, 1), 8, priority=-1)
    driver.step_until(lambda: first in driver.answers)
    second = driver.fork(first, 8, priority=-1)
    driver.step_until(lambda: second in driver.answers)
    urgent = driver.submit(prompt_of(10 * PAGE, 2), 4)
    driver.step_until(lambda: driver.is_running(urgent), at_most=2)
    assert driver.preemptions == [second, first]
    driver.run()
    driver.assert_nothing_left()


def test_pages_that_a_lower_request_has_yet_to_take_are_gained_by_pushing_it_out():
    driver = SchedulerDriver(usable_pages=20, max_step_tokens=8, max_context=100)
    low = driver.submit(prompt_of(70, 1), 4, priority=-1)
    driver.step()
    urgent = driver.submit(prompt_of(20, 2), 4)
    driver.step_until(lambda: driver.is_running(urgent), at_most=2)
    assert driver.preemptions == [low]
    driver.run()
    driver.assert_nothing_left()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("prompt_len", range(5 * PAGE - 1, 6 * PAGE + 2))
def test_a_fork_of_higher_priority_pushes_out_its_parent_once_at_most(prompt_len, prefix_cache):
    for generated in range(1, 8):
        driver = SchedulerDriver(usable_pages=8, prefix_cache=prefix_cache)
        parent = driver.submit(prompt_of(prompt_len, 1), 8, priority=-1)
        while len(driver.answers.get(parent, [])) < generated:
            driver.step()
        fork = driver.fork(parent, 6)
        driver.run()
        assert driver.preemptions in ([], [parent])
        assert driver.admissions in ([parent, fork], [parent, fork, parent])
        driver.assert_nothing_left()


@pytest.mark.parametrize("longest_prefix_first", [True, False])
def test_nobody_takes_the_place_of_the_one_that_pushed_another_out(longest_prefix_first):
    driver = SchedulerDriver(usable_pages=20, max_requests=1, longest_prefix_first=longest_prefix_first)
    low = driver.submit(prompt_of(20, 1), 20)
    driver.step_until(lambda: len(driver.answers.get(low, [])) == 4)
    urgent = [driver.submit(prompt_of(20, seed), 4, priority=1) for seed in (2, 1)]
    driver.run()
    assert driver.preemptions == [low]
    assert driver.admissions == [low, *urgent, low]
    driver.assert_nothing_left()


def test_a_request_of_low_priority_starts_within_a_bound_under_an_endless_stream_of_higher_ones():
    driver = SchedulerDriver(usable_pages=20, max_requests=2)
    for seed in range(2):
        driver.submit(prompt_of(4, seed), 4)
    driver.step()
    low = driver.submit(prompt_of(4, 99), 4, priority=-1)
    stream = iter(range(100, 10_000))
    while low in driver.unfinished:
        for _ in range(4 - driver.scheduler.num_waiting):
            driver.submit(prompt_of(4, next(stream)), 4)
        driver.step()
        assert driver.steps < AGING_STEPS + 400
    assert AGING_STEPS <= driver.first_step[low] <= AGING_STEPS + 8
    assert driver.preemptions == []  # and who has waited that long is not pushed out
    driver.run()


def test_of_the_requests_that_arrive_together_the_higher_priority_starts_first():
    driver = SchedulerDriver(usable_pages=20, max_requests=1)
    priorities = [0, 3, -1, 3, 2, 0]
    for seed, priority in enumerate(priorities):
        driver.submit(prompt_of(4, seed), 2, priority=priority)
    driver.run()
    assert driver.admissions == [1, 3, 4, 0, 5, 2]


def test_of_the_requests_that_arrive_together_the_shortest_starts_first():
    driver = SchedulerDriver(usable_pages=60, max_requests=1)
    for seed, tokens in enumerate([30, 4, 50, 4, 10]):
        driver.submit(prompt_of(tokens, seed), 2)
    driver.run()
    assert driver.admissions == [1, 3, 4, 0, 2]


def test_a_long_prompt_is_passed_by_those_alone_that_come_while_it_would_be_computed():
    driver = SchedulerDriver(usable_pages=60, max_requests=1, max_step_tokens=16)
    driver.submit(prompt_of(4, 1), 30)
    driver.step()
    long = driver.submit(prompt_of(50, 2), 2)  # three steps and two tokens
    arrivals = []
    for seed in range(5):
        arrivals.append(driver.submit(prompt_of(3, 10 + seed), 2))
        driver.step()
    driver.run()
    assert driver.admissions == [0, *arrivals[:3], long, *arrivals[3:]]


def test_a_preempted_request_keeps_its_place_and_its_tokens():
    driver = SchedulerDriver(usable_pages=40, max_requests=2)
    requests = [driver.submit(prompt_of(8, seed), 10) for seed in range(5)]
    driver.step_until(lambda: len(driver.answers.get(requests[1], [])) == 5)
    assert driver.preempt(requests[0])
    driver.run()
    assert driver.admissions == [0, 1, 0, 2, 3, 4]
    # Its pages stayed in the cache: 8 tokens, 5 or 6 generated ones of which one page is full, and the rest once.
    assert driver.computed[requests[0]] - (8 + 10 - 1) <= PAGE
    driver.assert_nothing_left()


def test_longest_prefix_first_orders_equals_by_what_is_cached():
    driver = SchedulerDriver(usable_pages=40, max_requests=1, longest_prefix_first=True)
    driver.submit(prompt_of(16, 1), 2)
    driver.run()
    cold, warm, warmer, above = (
        driver.submit(prompt_of(9, 2), 2),
        driver.submit(prompt_of(9, 1), 2),
        driver.submit(prompt_of(16, 1), 2),
        driver.submit(prompt_of(9, 3), 2, priority=1),
    )
    driver.run()
    assert driver.admissions[1:] == [above, warmer, warm, cold]
    driver.assert_nothing_left()


def test_longest_prefix_first_does_not_starve_what_is_not_cached():
    driver = SchedulerDriver(usable_pages=40, max_requests=2, longest_prefix_first=True)
    driver.submit(prompt_of(16, 1), 2)
    driver.run()
    for _ in range(4):
        driver.submit(prompt_of(16, 1), 2)
    driver.step()
    cold = [driver.submit(prompt_of(16, seed), 2) for seed in (2, 3)]
    while not driver.is_running(cold[1]):
        driver.submit(prompt_of(16, 1), 2)
        driver.step()
        assert driver.steps < 200
    for request_id in cold:
        since = driver.admissions[: driver.admissions.index(request_id)]
        assert len([other for other in since if other > request_id]) <= MAX_TIMES_PASSED + 1
    driver.run()
