"""Work that several processes do together, and what its failure means.

Contract: a collective that loses a peer fails with an error of its transport, of one type or another. Whoever starts
one does so inside `together`, so that callers meet one named error.
"""

import contextlib
import time
from collections.abc import Iterator

import jax

from kv_common.errors import JaxkvError

VERDICT_S = 2.0
"""For the lifeline of a peer that has ended to break, say so, and end this process, before a collective complains."""

VERDICT_LOOKS = 20
"""In how many sleeps: a pause of the whole machine, however long, ends one and leaves the others to the lifelines."""


class PeerLostError(JaxkvError):
    """A peer ended, or cannot be reached, while it was needed."""


@contextlib.contextmanager
def together(work: str, num_processes: int) -> Iterator[None]:
    """Around `work` (as in "a step") that `num_processes` do together. Raises PeerLostError where it fails in jax."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # a collective that fails comes as either
        if num_processes == 1 or isinstance(error, JaxkvError):
            raise
        for _ in range(VERDICT_LOOKS):
            time.sleep(VERDICT_S / VERDICT_LOOKS)
        raise PeerLostError(
            f"{work} of {num_processes} processes failed, which is how the end of one of them shows "
            f"({' '.join(str(error).split())[:200]}): start all of them again"
        ) from error
