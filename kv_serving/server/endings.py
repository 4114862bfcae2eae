"""Why a request ends without an answer, other than by what it asked for."""

from kv_common.errors import JaxkvError


class DeadlineError(JaxkvError):
    """A request whose time is up before it has an answer."""


class EngineStoppedError(JaxkvError):
    """The engine's thread has ended, or ends."""
