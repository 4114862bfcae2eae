"""The files of a batch: requests in, results out, one JSON object a line, as in OpenAI's batch API.

Contract: a result is in the file for good once it is written, and whole or not at all: what a kill left of a line is
cut off when the file is opened again. A request is known by its `custom_id`, so none is answered twice.
"""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from kv_common.errors import JaxkvError

URLS = ("/v1/completions", "/v1/chat/completions")
RESULT_HEAD = b'{"id":"batch_req_'
"""What each result begins with, by which one that a kill cut off is known."""


class BatchFileError(JaxkvError):
    """A file that is not a batch, or not the results of this one."""


class BatchRequest(NamedTuple):
    """A line of the input."""

    custom_id: str
    url: str
    body: Any


def read_requests(path: Path) -> list[BatchRequest]:
    """All requests of a file, in order. Raises BatchFileError with the line, before anything has run."""
    requests: dict[str, BatchRequest] = {}
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        request = _request(f"{path} line {number}", line)
        if request.custom_id in requests:
            raise BatchFileError(f"{path} line {number}: custom_id {request.custom_id!r} is there already: rename it")
        requests[request.custom_id] = request
    return list(requests.values())


class ResultFile:
    """The output, open for more results; `done` are the custom_ids of those that are there. Raises BatchFileError."""

    def __init__(self, path: Path) -> None:
        self.done: set[str] = set()
        whole = 0
        if path.exists():
            for number, line in enumerate(_lines(path), 1):
                if not line.endswith(b"\n"):
                    if not (line.startswith(RESULT_HEAD) or RESULT_HEAD.startswith(line)):
                        raise _no_result(f"{path} line {number}")
                    break
                self.done.add(_custom_id(f"{path} line {number}", line))
                whole += len(line)
        self._file = open(path, "ab")  # noqa: SIM115 (closed by __exit__)
        self._file.truncate(whole)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, line: bytes) -> None:
        """Add a result, for good."""
        self._file.write(line + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise BatchFileError(f"{path} cannot be read ({error.strerror}): name a file of requests") from error


def _request(where: str, line: bytes) -> BatchRequest:
    value = _json(where, line)
    custom_id, url = value.get("custom_id"), value.get("url")
    if not isinstance(custom_id, str) or not custom_id:
        raise BatchFileError(f"{where}: custom_id is {custom_id!r}: give each request a text of its own")
    if url not in URLS or value.get("method", "POST") != "POST":
        raise BatchFileError(f"{where}: {value.get('method')} {url!r} is not to be had: POST to {' or '.join(URLS)}")
    return BatchRequest(custom_id, url, value.get("body"))


def _custom_id(where: str, line: bytes) -> str:
    value = _json(where, line)
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not isinstance(value.get("response"), dict):
        raise _no_result(where)
    return custom_id


def _no_result(where: str) -> BatchFileError:
    return BatchFileError(f"{where} is no result of a batch: name another file for the results")


def _json(where: str, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BatchFileError(f"{where} is not JSON: give one object a line") from error
    if not isinstance(value, dict):
        raise BatchFileError(f"{where} is not an object: give one object a line")
    return value
