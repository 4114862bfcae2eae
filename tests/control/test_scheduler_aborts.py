"""Every way of ending a request, in every state that it can be in, leaves nothing behind."""

import pytest
from scheduler_driver import SchedulerDriver, prompt_of

from kv_control.scheduler import UnknownRequestError


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
