"""How many steps a burst may have, from how long steps have taken."""

import math
from collections.abc import Callable


class BurstPace:
    """Bursts of about `seconds`; single steps where that is 0, until one has been timed, and after an idle while."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._step_s = math.inf
        self._collected_s = -math.inf

    def steps(self, most: int) -> int:
        """How many, at most so many."""
        if self._step_s * most <= self._seconds:
            return most
        return max(1, int(self._seconds / self._step_s))

    def collected(self, steps: int) -> None:
        """The tokens of so many steps have come; those before them were waited for until the last call."""
        if self._seconds > 0:
            now = self._clock()
            self._step_s, self._collected_s = (now - self._collected_s) / steps, now
