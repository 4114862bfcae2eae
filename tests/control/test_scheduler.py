"""What a step holds, what is refused, and what every way of ending a request leaves behind: nothing."""

import numpy as np
import pytest
from scheduler_driver import PAGE, SchedulerDriver, prompt_of

from kv_common.errors import JaxkvError
from kv_control.page_allocator import OutOfPagesError
from kv_control.request_map import NoFreeRowError
from kv_control.scheduler import QueueFullError, RequestTooLargeError, UnknownRequestError


def rows_of(plan) -> dict[int, int]:
    """Tokens that the step computes, by request."""
    return dict(zip(plan.request_ids.tolist(), np.diff(plan.table.query_start).tolist(), strict=True))


def test_a_step_holds_one_token_of_each_decoding_row_then_the_chunks_and_no_more_than_its_budget():
    driver = SchedulerDriver(usable_pages=40, max_step_tokens=8)
    decoding = [driver.submit(prompt_of(3, seed), 20) for seed in range(2)]
    driver.step()
    first, second = driver.submit(prompt_of(9, 2)), driver.submit(prompt_of(9, 3))
    assert rows_of(driver.step()) == {decoding[0]: 1, decoding[1]: 1, first: 6}
    assert rows_of(driver.step()) == {decoding[0]: 1, decoding[1]: 1, first: 3, second: 3}
    assert rows_of(driver.step()) == {decoding[0]: 1, decoding[1]: 1, first: 1, second: 5}
    assert rows_of(driver.step()) == {decoding[0]: 1, decoding[1]: 1, first: 1, second: 1}
    driver.run()
    driver.assert_nothing_left()


@pytest.mark.parametrize("priority", [0, 1])
def test_a_long_prefill_never_delays_a_running_decode_by_more_than_one_chunk(priority):
    driver = SchedulerDriver(usable_pages=200, max_step_tokens=8, max_context=512)
    decoding = [driver.submit(prompt_of(2, seed), 100) for seed in range(3)]
    driver.step_until(lambda: len(driver.answers) == 3)
    long = driver.submit(prompt_of(300, 9), 2, priority=priority)
    steps = 0
    while driver.computed[long] < 300:
        rows = rows_of(driver.step())
        assert [rows[request_id] for request_id in decoding] == [1, 1, 1]
        assert rows[long] == 5
        steps += 1
    assert steps == 60
    driver.run()


def test_the_prefill_that_came_first_is_finished_first():
    driver = SchedulerDriver(usable_pages=60, max_step_tokens=8)
    requests = [driver.submit(prompt_of(24, seed), 1) for seed in range(3)]
    driver.run()
    assert [min(step for step, p in enumerate(driver.plans) if r in p.request_ids) for r in requests] == [0, 3, 6]


def test_tokens_do_not_depend_on_the_budget_or_on_the_neighbours():
    for max_step_tokens in (4, 5, 7, 16, 64):
        driver = SchedulerDriver(usable_pages=60, max_step_tokens=max_step_tokens)
        for seed in range(6):
            driver.submit(prompt_of(1 + 7 * seed, seed), 5)
        driver.run()  # the driver compares every token
        driver.assert_nothing_left()


def test_a_budget_that_could_not_give_every_row_a_token_is_refused():
    with pytest.raises(JaxkvError, match="max_step_tokens 3 is below max_requests 4"):
        SchedulerDriver(usable_pages=8, max_requests=4, max_step_tokens=3)


@pytest.mark.parametrize(
    ("tokens", "new", "message"),
    [
        (0, 1, "the prompt is empty; give at least one token"),
        (64, 1, "the prompt has 64 tokens and the context holds 64, one of them for the answer"),
        (30, 12, "30 prompt tokens and 12 new ones need 11 pages of 4 tokens and the pool has 10"),
        (1, 500, "1 prompt tokens and 63 new ones need 16 pages of 4 tokens and the pool has 10"),
    ],
)
def test_a_request_that_could_not_run_alone_is_refused_with_the_numbers(tokens, new, message):
    driver = SchedulerDriver(usable_pages=10)
    before = driver.books()
    with pytest.raises(RequestTooLargeError, match=message):
        driver.submit(prompt_of(tokens), new)
    with pytest.raises(RequestTooLargeError, match=message):
        driver.hold(prompt_of(tokens), new)
    assert driver.books() == before
    driver.assert_nothing_left()


def test_the_largest_request_that_fits_runs_since_its_last_token_needs_no_page():
    driver = SchedulerDriver(usable_pages=10)
    driver.submit(prompt_of(30), 11)
    driver.run()
    assert len(driver.answers[0]) == 11


def test_a_request_starts_only_where_its_first_new_token_fits_too():
    driver = SchedulerDriver(usable_pages=5)
    held = driver.hold(prompt_of(1, 1))
    driver.step_held([held])
    waiting = driver.submit(prompt_of(4 * PAGE, 2), 4)
    assert driver.step() is None  # it would stand still with all but one of the pages
    driver.end(held)
    driver.run(waiting)


def test_a_request_is_cut_where_the_context_ends():
    driver = SchedulerDriver(usable_pages=20, max_context=16)
    queued = driver.scheduler.submit(7, prompt_of(10), max_new_tokens=50)
    assert queued.max_tokens_total == 16


def test_a_full_queue_refuses_the_next_request_and_takes_it_once_there_is_room():
    driver = SchedulerDriver(usable_pages=20, max_requests=1, max_waiting=2)
    waiting = [driver.submit(prompt_of(4, seed)) for seed in range(2)]
    with pytest.raises(QueueFullError, match="2 requests wait and at most 2 may; try again later"):
        driver.submit(prompt_of(4))
    driver.end(waiting[0])
    driver.submit(prompt_of(4))
    driver.step()
    driver.submit(prompt_of(4))
    driver.run()
    driver.assert_nothing_left()


def test_a_preempted_request_returns_to_a_queue_that_is_full():
    driver = SchedulerDriver(usable_pages=20, max_waiting=1)
    running = driver.submit(prompt_of(4))
    driver.step()
    driver.submit(prompt_of(5))
    driver.preempt(running)
    assert driver.scheduler.num_waiting == 2
    driver.run()


def test_an_unknown_request_is_named_and_one_that_ended_is_unknown():
    driver = SchedulerDriver(usable_pages=20)
    request_id = driver.submit(prompt_of(4))
    driver.run()
    for unknown in (request_id, 99):
        with pytest.raises(UnknownRequestError, match=f"request {unknown} is neither waiting nor running"):
            driver.scheduler.finish(unknown)
        assert not driver.scheduler.preempt(unknown)
    driver.assert_nothing_left()


def waiting_for_a_row(driver):
    for seed in range(2):
        driver.submit(prompt_of(5, seed), 20)
    driver.step()
    return driver.submit(prompt_of(6, 9))


def looked_up_and_refused(driver):
    driver.submit(prompt_of(50, 1), 10)
    driver.step()
    request_id = driver.submit(prompt_of(50, 2))
    driver.step()
    return request_id


def prefilling(driver):
    request_id = driver.submit(prompt_of(40, 1))
    driver.step()
    driver.step()
    assert 0 < driver.kv_len(request_id) < 40
    return request_id


def decoding(driver):
    request_id = driver.submit(prompt_of(6, 1), 20)
    driver.submit(prompt_of(6, 2), 20)
    for _ in range(5):
        driver.step()
    return request_id


def in_flight_alone(driver):
    request_id = driver.submit(prompt_of(6, 1), 20)
    driver.step()
    return request_id


def preempted(driver):
    request_id = decoding(driver)
    assert driver.preempt(request_id)
    return request_id


def sampling_its_last_token(driver):
    request_id = driver.submit(prompt_of(6, 1), 2)
    driver.submit(prompt_of(6, 2), 20)
    driver.step()
    driver.step()
    row = driver.row_of(request_id)
    assert driver.running.num_tokens[row] == driver.running.max_tokens_total[row]
    return request_id


def waiting_for_a_prefix(driver):
    driver.submit(prompt_of(40, 1))
    driver.step()
    request_id = driver.submit(prompt_of(40, 1))
    driver.step()
    assert not driver.is_running(request_id)
    return request_id


def computing_a_prefix_that_another_waits_for(driver):
    waiting_for_a_prefix(driver)
    return 0


def fork_waiting_for_its_parent(driver):
    driver.submit(prompt_of(40, 1))
    driver.step()
    request_id = driver.fork(0)
    driver.step()
    assert not driver.is_running(request_id)
    return request_id


def parent_whose_fork_waits(driver):
    fork_waiting_for_its_parent(driver)
    return 0


def fork_that_runs(driver):
    driver.submit(prompt_of(6, 1), 20)
    driver.step()
    request_id = driver.fork(0, 20)
    driver.step()
    assert driver.is_running(request_id)
    return request_id


def parent_whose_fork_runs(driver):
    fork_that_runs(driver)
    return 0


def held(driver):
    return driver.hold(prompt_of(9, 1))


def held_on_a_fork(driver):
    driver.submit(prompt_of(9, 1))
    driver.run()
    request_id = driver.hold(prompt_of(7, 1))
    assert driver.residency._forks
    return request_id


STATES = (
    waiting_for_a_row,
    looked_up_and_refused,
    prefilling,
    decoding,
    in_flight_alone,
    preempted,
    sampling_its_last_token,
    fork_waiting_for_its_parent,
    parent_whose_fork_waits,
    fork_that_runs,
    parent_whose_fork_runs,
    held,
)
STATES_OF_A_CACHE = (waiting_for_a_prefix, computing_a_prefix_that_another_waits_for, held_on_a_fork)


@pytest.mark.parametrize(
    ("state", "prefix_cache"),
    [*((state, True) for state in (*STATES, *STATES_OF_A_CACHE)), *((state, False) for state in STATES)],
)
def test_an_abort_in_any_state_leaves_every_counter_where_it_was_and_the_others_go_on(state, prefix_cache):
    driver = SchedulerDriver(usable_pages=20, max_requests=2, max_step_tokens=8, prefix_cache=prefix_cache)
    request_id = state(driver)
    driver.end(request_id)
    with pytest.raises(UnknownRequestError):
        driver.scheduler.finish(request_id)
    driver.run()
    driver.assert_nothing_left()


def test_finishing_and_aborting_in_the_same_step_frees_once():
    driver = SchedulerDriver(usable_pages=20)
    going_on, ending = driver.submit(prompt_of(5, 1), 8), driver.submit(prompt_of(5, 2), 2)
    driver.step_until(lambda: len(driver.answers.get(ending, [])) == 1)
    driver.step()  # collects the last token, and ends the request
    assert ending not in driver.unfinished
    before = driver.books()
    with pytest.raises(UnknownRequestError):
        driver.scheduler.finish(ending)
    assert driver.books() == before
    driver.run(going_on)
    driver.assert_nothing_left()


def test_a_token_of_an_aborted_request_is_dropped_though_its_row_has_a_new_tenant():
    driver = SchedulerDriver(usable_pages=20, max_requests=1)
    aborted = driver.submit(prompt_of(5, 1), 8)
    follower = driver.submit(prompt_of(5, 2), 8)
    driver.step()
    row = driver.row_of(aborted)
    driver.end(aborted)
    driver.step()
    assert driver.row_of(follower) == row
    driver.run()
    assert not driver.answers.get(aborted)
    driver.assert_nothing_left()


def test_a_request_that_stops_one_step_late_leaves_nothing():
    driver = SchedulerDriver(usable_pages=20)
    for stop in range(1, 9):
        driver.submit(prompt_of(5, stop), 20, ends_at=5 + stop)
    driver.run()
    driver.assert_nothing_left()


def test_a_failed_reservation_of_held_rows_changes_nothing():
    driver = SchedulerDriver(usable_pages=4)
    held = [driver.hold(prompt_of(2 * PAGE - 1, seed)) for seed in range(2)]
    driver.step_held(held)
    driver.step_held(held)
    before = driver.books()
    with pytest.raises(OutOfPagesError, match="2 pages requested, 0 free"):
        driver.step_held(held)
    assert driver.books() == before
    driver.end(held[0])
    driver.step_held(held[1:])
    driver.end(held[1])
    driver.assert_nothing_left()


def test_a_held_request_that_does_not_fit_changes_nothing():
    driver = SchedulerDriver(usable_pages=4, max_requests=2)
    first = driver.hold(prompt_of(9, 1))
    driver.step_held([first])
    before = driver.books()
    with pytest.raises(OutOfPagesError, match="2 pages requested, 1 free"):
        driver.hold(prompt_of(5, 2))
    assert driver.books() == before
    second = driver.hold(prompt_of(1, 3))
    with pytest.raises(NoFreeRowError):
        driver.hold(prompt_of(4, 1))
    for request_id in (first, second):
        driver.end(request_id)
    driver.assert_nothing_left()


def test_a_held_request_is_never_preempted_and_what_waits_for_its_pages_runs_once_it_is_released():
    driver = SchedulerDriver(usable_pages=4)
    held = driver.hold(prompt_of(9, 1))
    driver.step_held([held])
    waiting = driver.submit(prompt_of(9, 2), priority=9)
    assert driver.step() is None
    assert not driver.preempt(held)
    driver.end(held)
    driver.run(waiting)
    driver.assert_nothing_left()
