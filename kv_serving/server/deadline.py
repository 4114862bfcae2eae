"""The end of a request for lack of time."""

from kv_common.errors import JaxkvError


class DeadlineError(JaxkvError):
    """A request whose time is up before it has an answer."""
