"""What running requests share: cached prefixes, and forks. The driver compares every slot that a step reads."""

import numpy as np
import pytest
from scheduler_driver import PAGE, VOCABULARY, SchedulerDriver, expected_of, prompt_of

from kv_control.step_builder import SharedPageError


def copies_of(driver) -> int:
    return sum(plan.copy_targets.size for plan in driver.plans)


def test_a_second_request_waits_for_the_pages_that_the_first_computes_and_then_computes_only_the_rest():
    driver = SchedulerDriver(usable_pages=60, max_step_tokens=24, max_context=128)
    shared = prompt_of(10 * PAGE, 1)
    first = driver.submit(np.append(shared, prompt_of(20, 2)), 4)
    second = driver.submit(np.append(shared, prompt_of(20, 3)), 4)
    driver.step_until(lambda: driver.is_running(second))
    # It starts once the third chunk has room for it; what it shares was there after the second.
    assert driver.first_step[second] == 2
    assert driver.pages_of(second)[:10] == driver.pages_of(first)[:10]
    driver.run()
    assert (driver.computed[first], driver.computed[second]) == (60 + 3, 20 + 3)
    driver.assert_nothing_left()


def test_of_many_requests_with_one_prefix_only_one_computes_it():
    driver = SchedulerDriver(usable_pages=100, max_requests=8, max_step_tokens=16)
    shared = prompt_of(8 * PAGE, 1)
    for seed in range(24):
        driver.submit(np.append(shared, prompt_of(5, 10 + seed)), 3)
    driver.run()
    # Some of the rest may begin with the same token by chance, which is then not computed either.
    assert sum(driver.computed.values()) <= 8 * PAGE + 24 * (5 + 2)
    driver.assert_nothing_left()


def test_a_waiting_request_is_passed_by_those_that_share_nothing():
    driver = SchedulerDriver(usable_pages=60)
    driver.submit(prompt_of(40, 1), 4, priority=1)
    waiting = driver.submit(prompt_of(40, 1), 4, priority=1)  # before the others, or it would not be passed
    for seed in range(2):
        driver.submit(prompt_of(3, 10 + seed), 30)
    driver.run()
    assert driver.admissions == [0, 2, 3, waiting]


@pytest.mark.parametrize("leave", ["end", "preempt"])
def test_where_the_first_leaves_in_the_middle_the_second_goes_on_from_there(leave):
    driver = SchedulerDriver(usable_pages=60, max_step_tokens=8)
    first, second = driver.submit(prompt_of(40, 1), 4), driver.submit(prompt_of(40, 1), 4)
    driver.step()
    driver.step()
    assert driver.kv_len(first) == 16
    getattr(driver, leave)(first)
    if leave == "preempt":
        # Back in its place at the head of the queue, it is the second that waits on.
        driver.run()
        assert driver.computed[first] == 40 + 3
        assert driver.computed[second] == 1 + 3
    else:
        driver.step()
        assert driver.kv_len(second) == 24
        driver.run()
        assert driver.computed[second] == 24 + 3
    driver.assert_nothing_left()


def test_pages_are_published_while_they_are_decoded():
    driver = SchedulerDriver(usable_pages=60)
    first = driver.submit(prompt_of(6, 1), 20)
    driver.step_until(lambda: len(driver.answers.get(first, [])) == 12)
    history = driver.expected[first].tokens[:18]
    second = driver.submit(np.append(history, 5), 4)
    driver.step()
    assert driver.pages_of(second)[:4] == driver.pages_of(first)[:4]
    driver.run()
    # 16 tokens in whole pages, and 17 and 18 are in a page that is not full yet.
    assert driver.computed[second] == 3 + 3
    driver.assert_nothing_left()


def test_equal_pages_that_were_computed_twice_are_merged():
    driver = SchedulerDriver(usable_pages=60)
    requests = [driver.submit(prompt_of(12, 1), 10, read_cache=False) for _ in range(3)]
    driver.step()
    driver.step()
    driver.step()
    assert [driver.pages_of(request_id)[:3] for request_id in requests[1:]] == [driver.pages_of(requests[0])[:3]] * 2
    assert driver.residency.trie.statistics.duplicates == 6
    assert [driver.computed[request_id] >= 12 for request_id in requests] == [True] * 3
    driver.run()
    driver.assert_nothing_left()


def test_a_request_that_may_not_read_the_cache_computes_every_token_and_waits_for_nobody():
    driver = SchedulerDriver(usable_pages=60, max_step_tokens=40)
    for read_cache in (True, False):
        driver.submit(prompt_of(13, 2), 2, read_cache=read_cache)
    driver.run()
    assert driver.first_step == {0: 0, 1: 0}
    for read_cache in (True, False, True):
        request_id = driver.submit(prompt_of(13, 1), 2, read_cache=read_cache)
        driver.run()
        assert driver.computed[request_id] == (1 + 1 if request_id == 4 else 13 + 1)
    driver.assert_nothing_left()


def test_what_was_published_before_a_preemption_is_hit_again_and_what_was_not_is_computed_again():
    driver = SchedulerDriver(usable_pages=12, max_step_tokens=10)
    request_id = driver.submit(prompt_of(33, 1), 4)
    driver.step()
    driver.step()  # 20 tokens are there, in 5 full pages
    driver.preempt(request_id)
    assert driver.allocator.cached_pages == 5
    driver.step()
    assert driver.running.cached_tokens[driver.row_of(request_id)] == 20
    driver.preempt(request_id)
    # 30 tokens in 7 pages and a part of one, which is lost, and unreadable from now on.
    assert driver.allocator.cached_pages == 7
    hitting = driver.submit(prompt_of(33, 1), 4)
    driver.run()
    assert driver.computed[request_id] == 33 + 3 + 2
    assert driver.computed[hitting] == 1 + 3
    driver.assert_nothing_left()


def test_cached_pages_make_room_and_what_hits_the_rest_still_reads_its_own():
    driver = SchedulerDriver(usable_pages=14)
    rng = np.random.default_rng(0)
    for _ in range(30):
        driver.submit(prompt_of(int(rng.integers(12, 30)), int(rng.integers(3))), 5)
        driver.run()
    assert driver.residency.trie.statistics.evictions > 20
    assert driver.residency.trie.statistics.hit_tokens > 0
    driver.assert_nothing_left()


def test_a_rewritten_history_hits_up_to_the_edit_and_no_further():
    for edited in range(24):
        driver = SchedulerDriver(usable_pages=40)
        first = driver.submit(prompt_of(24, 1), 8)
        driver.run()
        history = driver.expected[first].tokens.copy()
        history[edited] = (history[edited] + 1) % VOCABULARY
        second = driver.submit(history, 4)
        driver.run()  # the driver compares with a fresh run
        # Up to the edited token, which may be in the middle of a page.
        assert driver.computed[second] == 32 - edited + 3
        driver.assert_nothing_left()


@pytest.mark.parametrize("digest", [lambda data: b"same", lambda data: bytes([sum(data) % 3])])
def test_a_hash_that_collides_changes_no_content_and_holds_nobody_up(digest):
    driver = SchedulerDriver(usable_pages=24, digest=digest, max_step_tokens=8)
    for seed in range(12):
        driver.submit(prompt_of(9 + seed % 5, seed % 3), 6, namespace=b"a" if seed % 2 else b"b", priority=seed % 2)
        driver.step()
    driver.run()
    driver.assert_nothing_left()


def test_namespaces_never_share():
    driver = SchedulerDriver(usable_pages=60)
    requests = [driver.submit(prompt_of(13, 1), 4, namespace=name) for name in (b"a", b"b", b"a", b"")]
    driver.run()
    assert [driver.computed[request_id] for request_id in requests] == [16, 16, 4, 16]
    assert len({tuple(expected.content) for expected in driver.expected.values()}) == 3
    driver.assert_nothing_left()


def test_without_a_cache_nothing_is_looked_up_and_nothing_kept():
    driver = SchedulerDriver(usable_pages=60, prefix_cache=False)
    requests = [driver.submit(prompt_of(13, 1), 4) for _ in range(3)]
    driver.run()
    assert [driver.computed[request_id] for request_id in requests] == [16] * 3
    assert driver.free_pages == 60


def test_a_reset_while_requests_run_disturbs_none_of_them():
    driver = SchedulerDriver(usable_pages=60, max_step_tokens=8)
    requests = [driver.submit(prompt_of(20, seed), 8) for seed in (1, 1, 2)]
    while driver.unfinished:
        driver.step()
        driver.reset_prefix_cache()
    assert [len(driver.answers[request_id]) for request_id in requests] == [8] * 3
    driver.assert_nothing_left()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("prompt_len", range(1, 3 * PAGE + 2))
def test_forks_share_the_whole_pages_of_the_prompt_and_copy_the_partial_one_once_each(prompt_len, prefix_cache):
    driver = SchedulerDriver(usable_pages=60, prefix_cache=prefix_cache)
    parent = driver.submit(prompt_of(prompt_len, 1), 12)
    driver.step()
    forks = [driver.fork(parent, 12) for _ in range(3)]
    driver.step()
    whole, rest = divmod(prompt_len - 1, PAGE)
    for fork in forks:
        assert driver.pages_of(fork)[:whole] == driver.pages_of(parent)[:whole]
    assert copies_of(driver) == (3 if rest else 0)
    driver.run()
    # Of the prompt each computes its last token only, since it samples from it.
    assert [driver.computed[fork] for fork in forks] == [1 + 11] * 3
    assert copies_of(driver) == (3 if rest else 0)
    driver.assert_nothing_left()


def test_a_fork_waits_for_the_prompt_of_its_parent_and_starts_with_it():
    driver = SchedulerDriver(usable_pages=60, max_step_tokens=8, prefix_cache=False)
    parent = driver.submit(prompt_of(30, 1), 12)
    fork = driver.fork(parent, 12)
    driver.step_until(lambda: driver.is_running(fork))
    assert driver.computed[parent] >= 30
    driver.run()
    assert driver.computed[fork] == 1 + 11
    driver.assert_nothing_left()


def test_a_fork_of_a_parent_that_ended_or_was_preempted_computes_what_is_gone():
    for gone in ("end", "preempt"):
        driver = SchedulerDriver(usable_pages=60, max_requests=2, prefix_cache=False)
        parent = driver.submit(prompt_of(14, 1), 12)
        other = driver.submit(prompt_of(2, 2), 30)
        driver.step()
        fork = driver.fork(parent, 12)
        getattr(driver, gone)(parent)
        driver.run(fork)
        assert driver.computed[fork] == 14 + 11
        driver.run(other)
        driver.run()
        driver.assert_nothing_left()


def test_the_page_that_a_fork_copies_outlives_a_parent_that_writes_to_it_and_ends_in_the_same_step():
    for new_tokens in range(1, 6):
        driver = SchedulerDriver(usable_pages=6, prefix_cache=False)
        parent = driver.submit(prompt_of(6, 1), new_tokens)
        driver.step()
        driver.fork(parent, 6)
        driver.submit(prompt_of(3, 5), 6)
        driver.run()
        driver.assert_nothing_left()


def test_a_preempted_fork_hits_what_it_has_published_itself():
    driver = SchedulerDriver(usable_pages=60)
    parent = driver.submit(prompt_of(6, 1), 30)
    driver.step()
    fork = driver.fork(parent, 30)
    driver.step_until(lambda: len(driver.answers.get(fork, [])) == 12)
    driver.preempt(fork)
    driver.step()
    assert driver.running.cached_tokens[driver.row_of(fork)] == 4 * PAGE
    driver.run()
    driver.assert_nothing_left()


def test_a_fork_waits_for_a_parent_that_enters_again_with_a_page_to_copy():
    for prompt_len in range(12, 16):
        for generated in range(1, 7):
            driver = SchedulerDriver(usable_pages=60)
            driver.submit(prompt_of(prompt_len, 1), 12)
            driver.run()
            parent = driver.submit(prompt_of(prompt_len, 1), 12)
            while len(driver.answers.get(parent, [])) < generated:
                driver.step()
            driver.preempt(parent)
            driver.fork(parent, 12)
            driver.run()
            driver.assert_nothing_left()


def test_a_write_to_a_shared_page_is_refused():
    driver = SchedulerDriver(usable_pages=20)
    request_id = driver.submit(prompt_of(6, 1), 8)
    driver.step()
    page = driver.pages_of(request_id)[-1]
    driver.allocator.share([page])
    with pytest.raises(SharedPageError, match=f"page {page} has 2 holders and would be written"):
        driver.scheduler.schedule(may_preempt=False)


def test_nobody_waits_for_a_fork_that_will_not_publish():
    driver = SchedulerDriver(usable_pages=60, max_step_tokens=10)
    parent = driver.submit(prompt_of(3 * PAGE, 1), 20)
    driver.step_until(lambda: parent in driver.answers)
    driver.reset_prefix_cache()
    driver.fork(parent, 20)
    driver.step()
    publishing = driver.submit(prompt_of(3 * PAGE, 1), 4)
    driver.step()
    assert driver.kv_len(publishing) == 2 * PAGE
    driver.end(publishing)
    last = driver.submit(prompt_of(3 * PAGE, 1), 4)
    driver.step()
    assert driver.is_running(last)
    driver.run()
    driver.assert_nothing_left()


def test_a_held_request_shares_what_is_cached_and_nobody_waits_for_it():
    driver = SchedulerDriver(usable_pages=30)
    held = driver.hold(prompt_of(14, 1), 4)
    waiting = driver.submit(prompt_of(14, 1), 4)
    driver.step()
    assert driver.is_running(waiting)
    driver.step_held([held])
    second = driver.hold(prompt_of(14, 1), 4)
    driver.step_held([second])
    assert driver.computed[second] == 2
    assert driver.pages_of(second)[:3] == driver.pages_of(held)[:3] == driver.pages_of(waiting)[:3]
    for request_id in (held, second):
        driver.end(request_id)
    driver.run()
    driver.assert_nothing_left()


def test_the_device_of_these_tests_tells_contents_apart():
    # Otherwise nothing above would mean anything: one token, or the namespace, changes every slot behind it.
    plain, other = expected_of([1, 2, 3, 4], 4), expected_of([1, 2, 3, 4], 4, namespace=b"a")
    edited = expected_of([1, 9, 3, 4], 4)
    assert plain.content[0] == edited.content[0]
    assert not np.intersect1d(plain.content[1:], edited.content[1:]).size
    assert not np.intersect1d(plain.content, other.content).size
