"""Clients of a server, in a process of their own so that they take nothing from its interpreter.

Reads `{"url", "clients", "bodies"}` as JSON from stdin, sends each body as a streamed completion, `clients` at once,
and writes `{"duration_s", "texts", "first_s", "gap_s"}` to stdout: the text of each, seconds to its first event, and
seconds between its events. Streams are kept as they come and read when the clock has stopped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Received(NamedTuple):
    """A stream: seconds from sending to each part, and the parts."""

    times_s: Sequence[float]
    parts: Sequence[bytes]


async def run(url: str, clients: int, bodies: Sequence[Any]) -> dict[str, Any]:
    """All answers, and how long they took."""
    waiting = iter(enumerate(bodies))
    received: dict[int, Received] = {}
    started_s = time.perf_counter()
    await asyncio.gather(*(_client(url, waiting, received) for _ in range(clients)))
    duration_s = time.perf_counter() - started_s
    answers = [received[index] for index in range(len(bodies))]
    return {
        "duration_s": duration_s,
        "texts": ["".join(_texts(b"".join(answer.parts))) for answer in answers],
        "first_s": [answer.times_s[0] for answer in answers],
        "gap_s": [after - before for each in answers for before, after in itertools.pairwise(each.times_s)],
    }


async def _client(url: str, waiting: Iterator[tuple[int, Any]], received: dict[int, Received]) -> None:
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    for index, body in waiting:
        content = json.dumps({**body, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        sent_s = time.perf_counter()
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        status = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
        if status != b"200":
            raise SystemExit(f"request {index} was answered with {status.decode()}: {(await reader.read(500))!r}")
        times_s, parts = [], []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            parts.append((await reader.readexactly(size + 2))[:-2])
            times_s.append(time.perf_counter() - sent_s)
        await reader.readuntil(b"\r\n")
        received[index] = Received(times_s, parts)
    writer.close()


def _texts(stream: bytes) -> Iterator[str]:
    for event in stream.decode().split("\n\n"):
        data = event.removeprefix("data: ")
        if data and data != "[DONE]":
            yield from (choice["text"] for choice in json.loads(data)["choices"])


if __name__ == "__main__":
    task = json.load(sys.stdin)
    json.dump(asyncio.run(run(task["url"], task["clients"], task["bodies"])), sys.stdout)
