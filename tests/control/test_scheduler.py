"""What a step holds, what is refused, and that a refusal changes nothing."""

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


def test_a_prompt_without_an_answer_may_fill_the_context_and_the_pool():
    driver = SchedulerDriver(usable_pages=16)
    handle = driver.scheduler.hold(0, np.array(prompt_of(64), np.int32), max_new_tokens=0)
    budget = driver.scheduler.schedule_held(np.array([handle.row])).table.tokens
    steps = [driver.scheduler.schedule_held(np.array([handle.row])).table.tokens for _ in range(64 // budget - 1)]
    assert steps == [budget] * len(steps)
    assert driver.scheduler.running.kv_len[handle.row] == 64
    driver.scheduler.finish(0)
    driver.assert_nothing_left()
    with pytest.raises(RequestTooLargeError, match="the prompt has 65 tokens and the context holds 64; shorten"):
        driver.hold(prompt_of(65), 0)
    with pytest.raises(RequestTooLargeError, match="64 prompt tokens and 0 new ones need 16 pages of 4"):
        SchedulerDriver(usable_pages=15).hold(prompt_of(64), 0)


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


def test_a_failed_reservation_of_held_rows_changes_nothing():
    driver = SchedulerDriver(usable_pages=5)
    driver.submit(prompt_of(PAGE, 9), 1)
    driver.run()
    held = [driver.hold(prompt_of(2 * PAGE - 1, seed)) for seed in range(2)]
    driver.step_held(held)
    driver.step_held(held)
    before = driver.books()
    assert driver.allocator.cached_pages == 1  # which would not be enough, and stays
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


def test_nobody_is_preempted_where_that_would_free_nothing_for_who_has_to_go_on():
    driver = SchedulerDriver(usable_pages=6, max_step_tokens=24)
    twins = [driver.submit(prompt_of(9, 1), 8, read_cache=False) for _ in range(2)]
    driver.step()
    driver.step_until(lambda: driver.kv_len(twins[0]) == 3 * PAGE)
    driver.drain()
    assert driver.pages_of(twins[0]) == driver.pages_of(twins[1])
    held = driver.hold(prompt_of(3 * PAGE, 2), 1)
    driver.step_held([held])
    assert driver.step() is None
    assert driver.preemptions == []
    driver.end(held)
    driver.run()
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
