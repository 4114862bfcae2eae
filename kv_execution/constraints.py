"""What a request may be held to: a set of tokens that may come next, which depends on those that came.

The engine knows no grammar. It asks for the allowed tokens before each choice, and tells each token that was chosen.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenConstraint(Protocol):
    """The state of one request; only the thread that drives the engine uses it, and neither method may raise."""

    def allowed(self) -> NDArray[np.uint32]:
        """Which tokens may come next, as bits [ceil(vocab / 32)]: token t is bit t % 32 of word t // 32. At least one
        may.
        """

    def accept(self, token: int) -> None:
        """`token` was chosen."""


EVERY_TOKEN = np.uint32(0xFFFFFFFF)
"""A word of a mask that allows all of its tokens."""
