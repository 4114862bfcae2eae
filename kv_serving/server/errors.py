"""What a client is told when a request fails: OpenAI's error object, and the status that goes with it.

Contract: every failure leaves the server as one of these. What a client can get wrong says what to do; what the server
got wrong says no more than that, and the details go to the log.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kv_common.errors import JaxkvError


class ApiError(JaxkvError):
    """A failure with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The response's JSON."""
        return {
            "error": {"message": str(self), "type": _kind(self.status), "param": self.param, "code": self.code},
        }


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def unavailable(reason: str, retry_after_s: int) -> ApiError:
    """The server does not take requests now."""
    return ApiError(503, reason, code="unavailable", retry_after_s=retry_after_s)


INVALID_JSON = ApiError(400, "the body is not JSON in UTF-8: send a JSON object", code="invalid_json")


def not_sent_as_json(content_type: str) -> ApiError:
    """A body of another content type."""
    kind = f"as {content_type[:100]!r}" if content_type else "without a content type"
    message = f"the body is sent {kind}: send the header `Content-Type: application/json`"
    return ApiError(415, message, param="content-type", code="unsupported_media_type")


def malformed(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """A body that is not of the form it should have, by what pydantic says of it."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "json_invalid":
        return INVALID_JSON
    return ApiError(422, f"{where or 'the body'}: {first['msg']}", param=where or None, code=first["type"])


def too_many(message: str) -> ApiError:
    """More requests than the server takes at once."""
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=1)


def api_error_of(error: Exception) -> ApiError:
    """How `error`, raised for a request, is told to its client."""
    from kv_control.page_allocator import OutOfPagesError
    from kv_control.scheduler import QueueFullError, RequestTooLargeError
    from kv_execution.batcher import PromptError, RequestOptionError
    from kv_execution.sampling_params import SamplingParamsError
    from kv_serving.server.endings import DeadlineError, EngineStoppedError
    from kv_serving.server.grammars import GrammarError
    from kv_serving.session import PromptOptionError
    from kv_serving.stop_strings import StopStringError
    from models import ChatTemplateError, TokenizerError

    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return too_many(str(error))
    if isinstance(error, DeadlineError):
        return ApiError(408, str(error), code="deadline_exceeded")
    if isinstance(error, (OutOfPagesError, EngineStoppedError)):
        return unavailable(str(error), 1)
    if isinstance(error, RequestTooLargeError):
        return ApiError(400, str(error), code="context_length_exceeded")
    refusals = (
        GrammarError,
        SamplingParamsError,
        PromptError,
        RequestOptionError,
        StopStringError,
        PromptOptionError,
        ChatTemplateError,
        TokenizerError,
    )
    if isinstance(error, refusals):
        return ApiError(400, str(error), code="invalid_value")
    return ApiError(500, "the server failed on this request; it goes on, so try again", code="internal_error")
