"""The recency queue against a list that is searched."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_control.recency_queue import RecencyQueue

NUM_IDS = 7
some_ids = st.lists(st.integers(0, NUM_IDS - 1), unique=True)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.fast = RecencyQueue(NUM_IDS)
        self.naive = []

    @rule(ids=some_ids)
    def push(self, ids):
        self.fast.push(np.array(ids, np.int32))
        self.naive = [one for one in self.naive if one not in ids] + ids

    @rule(ids=some_ids)
    def discard(self, ids):
        self.fast.discard(np.array(ids, np.int32))
        self.naive = [one for one in self.naive if one not in ids]

    @rule(count=st.integers(0, NUM_IDS + 1))
    def oldest(self, count):
        assert self.fast.oldest(count).tolist() == self.naive[:count]

    @invariant()
    def the_order_agrees(self):
        assert len(self.fast) == len(self.naive)


TestQueueAgainstItsModel = QueueMachine.TestCase
TestQueueAgainstItsModel.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def test_the_oldest_are_found_behind_many_stale_entries():
    queue = RecencyQueue(5000)
    ids = np.arange(5000, dtype=np.int32)
    queue.push(ids)
    queue.push(ids[:4990])
    assert queue.oldest(12).tolist() == [*range(4990, 5000), 0, 1]


def test_the_buffer_is_never_outgrown():
    queue = RecencyQueue(10)
    for _ in range(100):
        queue.push(np.arange(10, dtype=np.int32))
    assert queue.oldest(10).tolist() == list(range(10))
