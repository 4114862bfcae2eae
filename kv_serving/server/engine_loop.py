"""The thread that drives the engine: it alone touches it, between steps it does what the front asks, then it steps.

Contract: `submit` and `abort` are called on the event loop and never wait; events come back there, one wake-up for all
events of a step. A group that is aborted holds no page once the step that was running has ended. A step that raises
fails the groups that held a row, and the rest go on: where it was cut off halfway the engine starts afresh, and the
groups that only waited are queued again. Where even that fails the loop ends, and says why.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from kv_common.errors import JaxkvError
from kv_control.page_allocator import OutOfPagesError
from kv_execution.runtime import InterruptedStepError
from kv_serving.server.endings import DeadlineError, EngineStoppedError
from kv_serving.server.engine_snapshot import EngineSnapshot, snapshot_of
from kv_serving.server.prompt_scorer import PromptScorer
from kv_serving.server.request_group import ChoiceToken, Event, EventChannel, Failure, RequestGroup, put_all

if TYPE_CHECKING:
    from kv_execution import Batcher, PagedEngine

logger = logging.getLogger(__name__)


class EngineState(StrEnum):
    """Where the engine's thread is."""

    LOADING = "loading"
    READY = "ready"
    STOPPED = "stopped"
    FAILED = "failed"


class EngineLoop:
    """Owns the engine and its thread. `on_state` is called with a new state on `loop`, `after_step` on the thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_state: Callable[[EngineState], None],
        after_step: Callable[["PagedEngine"], None] = lambda engine: None,
    ) -> None:
        self.state = EngineState.LOADING
        self.error: BaseException | None = None
        """Why the state is FAILED."""
        self.snapshot: EngineSnapshot | None = None
        """The engine's counts after its last step."""
        self.loop = loop
        self._on_state, self._after_step = on_state, after_step
        self._submitted: list[RequestGroup] = []
        self._aborted: list[tuple[RequestGroup, int | None]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._engine: PagedEngine
        self._batcher: Batcher
        self._choices: dict[int, tuple[RequestGroup, int]] = {}
        self._unstarted: list[RequestGroup] = []
        self._scorer = PromptScorer()
        self._deliveries: list[tuple[EventChannel, Event]] = []

    def start(self, load: Callable[[], "PagedEngine"]) -> None:
        """Begin the thread: `load` gives the engine, ready to run."""
        self._thread = threading.Thread(target=self._run, args=(load,), name="engine", daemon=True)
        self._thread.start()

    def submit(self, group: RequestGroup) -> None:
        """Queue a group; what is wrong with it comes as a Failure."""
        group.submitted_s = time.monotonic()
        with self._wake:
            if self.state is EngineState.READY:
                self._submitted.append(group)
                self._wake.notify()
                return
        group.channel.put(Failure(EngineStoppedError("the engine does not run; send the request again")))

    def abort(self, group: RequestGroup, choice: int | None = None) -> None:
        """End a choice, or all of the group, whose events nobody wants any more."""
        with self._wake:
            self._aborted.append((group, choice))
            self._wake.notify()

    def stop(self, timeout_s: float = 30.0) -> bool:
        """End the thread after the step it is in, and say whether it has ended: it does not while it loads. Groups
        that are left fail.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is None:
            return True
        self._thread.join(0 if self.state is EngineState.LOADING else timeout_s)
        return not self._thread.is_alive()

    def _run(self, load: Callable[[], "PagedEngine"]) -> None:
        try:
            self._engine = load()
            self._batcher = self._engine.batcher()
            self._take_snapshot()
            self._enter(EngineState.READY)
            while self._work():
                pass
            self._end(EngineState.STOPPED, "the server has stopped; send the request again")
        except BaseException as error:  # whatever ends the thread has to be told, or every client would wait for ever
            plain = self.state is EngineState.LOADING and isinstance(error, JaxkvError)
            logger.error("the engine's thread has ended: %s", error, exc_info=not plain)
            self.error = error
            self._end(EngineState.FAILED, "the engine has failed; start the server again")

    def _work(self) -> bool:
        """Do what was asked and one step; False when it is time to stop."""
        with self._wake:
            while not (self._submitted or self._aborted or self._stopping or self._has_work):
                self._wake.wait()
            if self._stopping:
                return False
            submitted, self._submitted = self._submitted, []
            aborted, self._aborted = self._aborted, []
        for group in submitted:
            self._begin(group)
        for group, choice in aborted:  # after all that was submitted, so that what is aborted is known
            self._abort(group, choice)
        if self._scorer.waiting:
            self._score()
        if self._batcher.has_unfinished:
            self._step()
        self._take_snapshot()
        self._deliver()
        return True

    @property
    def _has_work(self) -> bool:
        return self._batcher.has_unfinished or self._scorer.waiting > 0

    def _step(self) -> None:
        try:
            outputs = self._batcher.step()
        except OutOfPagesError as error:
            if not self._scorer.waiting:  # which would give its pages back
                self._recover(error)
            return
        except Exception as error:  # a fault in one step must not end the others' answers
            logger.exception("a step failed")
            self._recover(error)
            return
        now_s = time.monotonic()
        self._note_started(now_s)
        for output in outputs:
            entry = self._choices.get(output.request_id)
            if entry is None:
                continue
            group, choice = entry
            self._deliveries.append((group.channel, ChoiceToken(choice, output, now_s)))
            if output.finish_reason is not None:
                del self._choices[output.request_id], group.request_ids[choice]

    def _score(self) -> None:
        group = self._scorer.current
        try:
            if group.deadline_s is not None and time.monotonic() > group.submitted_s + group.deadline_s:
                raise DeadlineError("the request ran out of time before its prompt was computed")
            event = self._scorer.step(self._engine, may_wait=self._batcher.has_unfinished)
        except Exception as error:  # as for a step
            if not isinstance(error, JaxkvError):
                logger.exception("a prompt could not be computed")
            self._scorer.remove(group)
            self._deliveries.append((group.channel, Failure(error)))
            if self._interrupted:
                self._recover(error)
            return
        if event is not None:
            self._deliveries.append((group.channel, event))
            if group.generates:
                self._submit(group)

    def _begin(self, group: RequestGroup) -> None:
        if group.samples:
            self._submit(group)
        else:
            self._scorer.add(group)

    def _submit(self, group: RequestGroup) -> None:
        deadline_s = None
        if group.deadline_s is not None:
            deadline_s = max(0.0, group.submitted_s + group.deadline_s - time.monotonic())
        first: int | None = None
        try:
            for choice, params in group.choices.items():
                if first is None:
                    request_id = first = self._batcher.submit(
                        group.token_ids,
                        params,
                        priority=group.priority,
                        deadline_s=deadline_s,
                        cache_salt=group.cache_salt,
                        adapter=group.adapter,
                        constraint=group.constraints.get(choice),
                    )
                else:
                    request_id = self._batcher.fork(
                        first,
                        params,
                        priority=group.priority,
                        deadline_s=deadline_s,
                        constraint=group.constraints.get(choice),
                    )
                group.request_ids[choice] = request_id
                self._choices[request_id] = group, choice
        except Exception as error:  # one request that cannot be queued is no reason to stop for the others
            if not isinstance(error, JaxkvError):
                logger.exception("a request could not be queued")
            self._abort(group)
            self._deliveries.append((group.channel, Failure(error)))
            return
        self._unstarted.append(group)

    def _abort(self, group: RequestGroup, choice: int | None = None) -> None:
        if choice is None:
            self._scorer.remove(group)
        for ended in list(group.request_ids) if choice is None else [choice]:
            request_id = group.request_ids.pop(ended, None)
            if request_id is not None:
                self._batcher.abort(request_id)
                del self._choices[request_id]

    def _recover(self, error: Exception) -> None:
        """Fail the groups that the step touched and put the rest where they were."""
        entries = list(self._choices.items())
        touched = {id(group) for request_id, (group, _) in entries if not self._batcher.is_waiting(request_id)}
        failed = [entry for _, entry in entries if id(entry[0]) in touched or not touched]
        self._fail(failed, error)
        if not self._interrupted:
            return
        self._scorer.restart()
        waiting = list({id(group): group for group, _ in self._choices.values()}.values())
        self._choices.clear()
        self._engine.init_paged_runtime()
        self._batcher = self._engine.batcher()
        for group in waiting:
            group.request_ids.clear()
            self._submit(group)

    @property
    def _interrupted(self) -> bool:
        try:
            self._engine.batcher()
        except InterruptedStepError:
            return True
        return False

    def _fail(self, entries: Sequence[tuple[RequestGroup, int]], error: Exception) -> None:
        for group in {id(group): group for group, _ in entries}.values():
            self._abort(group)
            self._deliveries.append((group.channel, Failure(error)))

    def _end(self, state: EngineState, reason: str) -> None:
        """Nothing is taken any more, and whoever waits is told."""
        with self._wake:
            self.state = state
        scored = [self._scorer.pop() for _ in range(self._scorer.waiting)]
        groups = {id(group): group for group, _ in self._choices.values()}
        for group in [*groups.values(), *scored, *self._submitted]:
            self._deliveries.append((group.channel, Failure(EngineStoppedError(reason))))
        self._deliver()
        self._enter(state)

    def _note_started(self, now_s: float) -> None:
        if self._unstarted:
            waiting = []
            for group in self._unstarted:
                if any(self._batcher.is_waiting(request_id) for request_id in group.request_ids.values()):
                    waiting.append(group)
                else:
                    group.started_s = now_s
            self._unstarted = waiting

    def _take_snapshot(self) -> None:
        self.snapshot = snapshot_of(self._engine)
        self._after_step(self._engine)

    def _deliver(self) -> None:
        if self._deliveries:
            deliveries, self._deliveries = self._deliveries, []
            self._call(lambda: put_all(deliveries))

    def _enter(self, state: EngineState) -> None:
        self.state = state
        self._call(lambda: self._on_state(state))

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # of a loop that is closed: the server has ended already
            self.loop.call_soon_threadsafe(function)
