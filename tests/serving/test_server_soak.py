"""Many clients at once, most of them ill-behaved: nothing leaks, and every whole answer is the engine's own.

What each client does is drawn from a seed: whole answers, streams, streams and answers that nobody waits for,
deadlines, bodies that are malformed or too large, stop strings.
"""

import asyncio
import dataclasses
import gc
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from patience import HANG_S, wait_for
from server_case import ENGINE, Case, running_server

from kv_execution import SamplingParams
from kv_serving.memory import release_unused_memory
from kv_serving.server.limits import Limits
from kv_serving.stop_strings import StopStrings
from kv_serving.text_assembly import TextAssembly
from models import StreamDecoder

MAX_BODY = 10_000
GROWTH_BYTES = 1000 * 4096
"""4 KiB for each request of the second half of a soak, less than the tokens and text of most."""
CONFIG = dataclasses.replace(ENGINE, max_requests=8, max_waiting=128, provider="auto")


class Asked(NamedTuple):
    """What a client does: `kind`, and the body it sends."""

    kind: str
    body: dict[str, Any]


def draw(rng: random.Random) -> Asked:
    kinds = (
        ["whole"] * 5 + ["stream"] * 5 + ["leave_stream"] * 3 + ["leave_whole", "deadline", "malformed", "oversized"]
    )
    body: dict[str, Any] = {
        "prompt": [rng.randrange(5, 270) for _ in range(rng.randrange(1, 60))],
        "max_tokens": rng.randrange(1, 40),
        "temperature": rng.choice([0.0, 0.7, 1.5]),
        "top_k": rng.choice([0, 20]),
        "top_p": rng.choice([1.0, 0.9]),
        "frequency_penalty": rng.choice([0.0, 0.5]),
        "seed": rng.randrange(1 << 40),
        "stop": rng.choice([[], ["th"], ["e", "zz"]]),
        "ignore_eos": rng.random() < 0.5,
        "priority": rng.randrange(3),
        "cache_salt": rng.choice(["", "a"]),
    }
    if rng.random() < 0.3:  # a prefix that others have too
        body["prompt"] = [*range(10, 60), *body["prompt"][:10]]
    return Asked(rng.choice(kinds), body)


async def ask(http: httpx.AsyncClient, asked: Asked, leave_after: int) -> str | None:
    """The text of an answer that was waited for."""
    body = asked.body
    match asked.kind:
        case "whole":
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            return str(response.json()["choices"][0]["text"])
        case "stream" | "leave_stream":
            text, events = "", 0
            async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if asked.kind == "leave_stream" and events == leave_after:
                        return None
                    events += 1
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
            return text if asked.kind == "stream" else None
        case "leave_whole":
            try:
                await asyncio.wait_for(http.post("/v1/completions", json=body), leave_after / 100)
            except TimeoutError:
                return None
        case "deadline":
            response = await http.post("/v1/completions", json={**body, "deadline_s": leave_after / 1000 + 1e-6})
            assert response.status_code in (200, 408)
        case "malformed":
            broken = json.dumps(body).encode()[: -1 - leave_after]
            response = await http.post("/v1/completions", content=broken, headers={"content-type": "application/json"})
            assert response.status_code == 400
        case "oversized":
            response = await http.post("/v1/completions", json={**body, "user": "x" * MAX_BODY})
            assert response.status_code == 413
    return None


async def soak(url: str, everything: list[Asked], at_once: int, seed: int) -> list[str | None]:
    rng = random.Random(seed)
    waiting = iter(enumerate(everything))
    texts: list[str | None] = [None] * len(everything)
    limits = httpx.Limits(max_connections=at_once)

    async def client() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=HANG_S, limits=limits, trust_env=False) as http:
            for index, asked in waiting:
                texts[index] = await ask(http, asked, rng.randrange(8))

    async with asyncio.TaskGroup() as clients:
        for _ in range(at_once):
            clients.create_task(client())
    return texts


def expected_text(case: Case, body: dict[str, Any], tokens: tuple[int, ...], reason: str) -> str:
    assembly = TextAssembly(StreamDecoder(case.model.tokenizer), StopStrings(body["stop"]))
    text = ""
    for index, token in enumerate(tokens):
        text += assembly.accept(token, reason if index == len(tokens) - 1 else None)
        if assembly.finish_reason is not None:
            break
    return text


def check_answers(case: Case, everything: list[Asked], texts: list[str | None]) -> int:
    done = [(asked.body, text) for asked, text in zip(everything, texts, strict=True) if text is not None]
    names = ("max_tokens", "temperature", "top_k", "top_p", "frequency_penalty", "seed", "ignore_eos")
    for start in range(0, len(done), ENGINE.max_waiting or 1):
        part = done[start : start + (ENGINE.max_waiting or 1)]
        params = [SamplingParams(**{name: body[name] for name in names}) for body, _ in part]
        results = case.engine.generate([body["prompt"] for body, _ in part], params)
        for (body, text), result in zip(part, results, strict=True):
            assert text == expected_text(case, body, result.tokens, result.finish_reason)
    return len(done)


def tasks_of(case: Case) -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    return asyncio.run_coroutine_threadsafe(count(), case.server.context.engine.loop).result(HANG_S)


def memory_bytes() -> int:
    """What the process holds, without what it would give back if it were asked to."""
    gc.collect()
    release_unused_memory()
    return int(psutil.Process().memory_info().rss)


def run_soak(case: Case, requests: int, at_once: int, growth_bytes: int | None) -> tuple[list[Asked], list[str | None]]:
    """What was asked, and the texts of whoever waited."""
    everything = [draw(random.Random(index)) for index in range(requests)]
    half = requests // 2
    idle_tasks = tasks_of(case)
    texts = asyncio.run(soak(case.server.url, everything[:half], at_once, 0))
    case.settle()
    memory = memory_bytes()
    texts += asyncio.run(soak(case.server.url, everything[half:], at_once, 1))
    case.settle()
    assert growth_bytes is None or memory_bytes() - memory < growth_bytes
    wait_for(lambda: tasks_of(case) <= idle_tasks + 1)  # the connection of the case's own client
    return everything, texts


def check_soak(case: Case, everything: list[Asked], texts: list[str | None]) -> None:
    """Once the server is gone, and the engine this thread's alone."""
    assert case.engine.stats().pages_in_use == 0
    assert check_answers(case, everything, texts) > len(everything) // 3
    assert case.engine.stats().pages_in_use == 0


def test_nothing_leaks_and_every_answer_is_the_engines(tmp_path: Path) -> None:
    with running_server(tmp_path, config=CONFIG, limits=Limits(max_body_bytes=MAX_BODY)) as case:
        answered = run_soak(case, 60, 8, None)
    check_soak(case, *answered)


@pytest.mark.slow
def test_two_thousand_clients_leave_memory_as_it_was(tmp_path: Path) -> None:
    with running_server(tmp_path, config=CONFIG, limits=Limits(max_body_bytes=MAX_BODY)) as case:
        case.engine.warmup_paged()  # what is compiled stays, and is no leak
        answered = run_soak(case, 2000, 64, GROWTH_BYTES)
    check_soak(case, *answered)
