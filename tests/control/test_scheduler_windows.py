"""Pages wholly behind every layer's window go back to the pool while their request runs."""

import pytest
from scheduler_driver import PAGE, SchedulerDriver, prompt_of

from kv_control.scheduler import RequestTooLargeError

REACH = 6
WINDOW_PAGES = 3
"""Pages that hold the window of a query and the token after it, wherever they begin."""


def windowed(usable_pages=10, *, max_step_tokens=8, **options) -> SchedulerDriver:
    return SchedulerDriver(
        usable_pages=usable_pages, max_step_tokens=max_step_tokens, max_context=400, reach=REACH, **options
    )


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_generation_longer_than_the_pool_holds_a_window_of_it(prefix_cache):
    driver = windowed(prefix_cache=prefix_cache)
    request = driver.submit(prompt_of(5), 300)  # 76 pages
    while driver.unfinished:
        driver.step()
        if driver.is_running(request) and driver.kv_len(request) > 30:
            held = driver.residency.request_map.held_pages(driver.row_of(request))
            assert len(held) <= WINDOW_PAGES
            assert driver.allocator.live_pages == len(held)
    assert driver.preemptions == []
    driver.assert_nothing_left()


def test_a_prompt_longer_than_the_pool_is_computed_in_chunks():
    driver = windowed()
    driver.submit(prompt_of(200), 20)
    driver.run()
    assert driver.preemptions == []
    driver.assert_nothing_left()


def test_a_model_that_sees_all_gives_nothing_back():
    driver = SchedulerDriver(usable_pages=10, max_step_tokens=8, max_context=400)
    request = driver.submit(prompt_of(5), 20)
    while driver.unfinished:
        driver.step()
        if driver.is_running(request):
            assert not driver.residency.request_map.first_held.any()
    with pytest.raises(RequestTooLargeError, match="need 76 pages of 4 tokens and the pool has 10"):
        driver.submit(prompt_of(5), 300)


def test_what_was_given_back_is_a_prefix_for_others_and_held_by_nobody():
    driver = windowed(usable_pages=40)
    prompt = prompt_of(60)
    first = driver.submit(prompt, 30)
    while driver.unfinished:
        driver.step()
    again = driver.submit(prompt, 10)
    while driver.unfinished:
        driver.step()
        if driver.is_running(again):
            assert len(driver.residency.request_map.held_pages(driver.row_of(again))) <= WINDOW_PAGES + 1
    assert driver.computed[again] == 60 - 59 + 9
    assert driver.computed[first] == 60 + 29
    driver.assert_nothing_left()


def test_cached_pages_above_held_ones_make_room():
    # One long request fills the pool with pages that only the cache holds, each above those that it still holds.
    driver = windowed(usable_pages=12)
    driver.submit(prompt_of(40), 100)
    for _ in range(12):
        driver.step()
    assert driver.allocator.cached_pages >= 6
    driver.submit(prompt_of(20, seed=1), 20)  # finds no free page
    driver.run()
    assert driver.preemptions == []
    driver.assert_nothing_left()


def test_a_hit_longer_than_the_pool_has_room_beside_is_admitted():
    driver = windowed(usable_pages=12)
    prompt = prompt_of(44)
    driver.submit(prompt, 2)
    driver.run()
    assert driver.allocator.cached_pages == 11
    follow = driver.submit(driver.expected[0].tokens[:45], 100)  # behind eleven cached pages, twenty-five more
    driver.run()
    assert driver.computed[follow] <= 101 + PAGE
    driver.assert_nothing_left()


def test_a_fork_of_a_request_that_gave_back_pages_computes_them_itself():
    driver = windowed(usable_pages=20, prefix_cache=False)
    parent = driver.submit(prompt_of(20), 60)
    for _ in range(20):
        driver.step()
    assert driver.residency.request_map.first_held[driver.row_of(parent)] > 0
    child = driver.fork(parent, 10)
    driver.run()
    assert driver.computed[child] == 29
    driver.assert_nothing_left()


def test_a_preempted_request_comes_back_with_all_it_has_to_compute_again():
    driver = windowed(usable_pages=12, prefix_cache=False)
    request = driver.submit(prompt_of(30), 40)
    for _ in range(20):
        driver.step()
    assert driver.preempt(request)
    driver.run()
    driver.assert_nothing_left()
