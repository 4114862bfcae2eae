"""Clients that mean harm: paths and headers that might lead around the keys, and floods."""

import contextlib
import select
import socket
from collections.abc import Iterable, Iterator
from itertools import repeat

import pytest
from patience import HANG_S
from server_case import Case, running_server

from kv_serving.server.api_keys import ApiKeys
from kv_serving.server.limits import Limits

KEY = b"authorization: Bearer alpha\r\n"
MAX_TAKEN = 8 << 20
"""Bytes of a flood by whose end the server has to have hung up; what the kernel holds for both sides is less."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    keys, limits = ApiKeys(["alpha", "beta"]), Limits(max_body_bytes=20_000)
    with running_server(tmp_path_factory.mktemp("tiny"), api_keys=keys, limits=limits) as running:
        yield running


@pytest.fixture(autouse=True)
def _the_server_goes_on(case: Case) -> Iterator[None]:
    yield
    assert case.http.get("/v1/models", headers={"authorization": "Bearer alpha"}).status_code == 200
    case.settle()


def connected(case: Case) -> socket.socket:
    host, port = case.server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=HANG_S)


def answers(case: Case, parts: Iterable[bytes]) -> bytes:
    """What comes back for these bytes, as they are, until the server hangs up or has nothing more to say."""
    received, sent = b"", 0
    with connected(case) as client:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                client.sendall(part)
                sent += len(part)
                assert sent < MAX_TAKEN, "the server takes whatever comes"
        with contextlib.suppress(ConnectionError):
            while data := client.recv(65_536):
                received += data
    return received


def get(path: bytes, *headers: bytes) -> bytes:
    return b"GET %s HTTP/1.1\r\nhost: x\r\n%sconnection: close\r\n\r\n" % (path, b"".join(headers))


@pytest.mark.parametrize(
    "path",
    [
        b"/v1/models",
        b"/v1/models/",
        b"/v1/models?/health",
        b"/v1/models#/health",
        b"/v1/models;/health",
        b"/V1/MODELS",
        b"/%76%31/models",
        b"/v1%2fmodels",
        b"//v1/models",
        b"/./v1/models",
        b"/health/../v1/models",
        b"/health/..%2fv1/models",
        b"/health/%2e%2e/v1/models",
        b"/health/..;/v1/models",
        b"/health%2f..%2fv1%2fmodels",
        b"/health%00/../v1/models",
        b"/health\\..\\v1\\models",
        b"http://x/v1/models",
        b"http://x/health/../v1/models",
        b"/v1/models/../../openapi.json",
        b"/openapi.json",
        b"/docs",
    ],
)
def test_no_path_leads_around_the_keys(case: Case, path: bytes) -> None:
    head, _, body = answers(case, [get(path)]).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] in (b"401", b"400")
    assert b"tiny" not in body


@pytest.mark.parametrize(
    "header",
    [
        b"x-original-url: /v1/models\r\n",
        b"x-rewrite-url: /v1/models\r\n",
        b"x-forwarded-prefix: /v1/models\r\n",
        b"x-http-method-override: POST\r\n",
    ],
)
def test_no_header_leads_to_another_path(case: Case, header: bytes) -> None:
    plain = answers(case, [get(b"/version")]).partition(b"\r\n\r\n")[2]
    assert answers(case, [get(b"/version", header)]).partition(b"\r\n\r\n")[2] == plain


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"authorization: \r\n",
        b"authorization: Bearer\r\n",
        b"authorization: Bearer \r\n",
        b"authorization: Bearer alph\r\n",
        b"authorization: Bearer alpha beta\r\n",
        b"authorization: Bearer alpha,beta\r\n",
        b"authorization: Bearer ALPHA\r\n",
        b"authorization: Bearer \xff\xfe\r\n",
        b"authorization: Basic alpha\r\n",
        b"authorization: Token alpha\r\n",
        b"authorization: alpha\r\n",
        b"proxy-authorization: Bearer alpha\r\n",
        b"x-api-key: alpha\r\n",
        b"cookie: authorization=Bearer alpha\r\n",
    ],
)
def test_nothing_but_a_key_opens(case: Case, header: bytes) -> None:
    head, _, body = answers(case, [get(b"/v1/models", header)]).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == b"401"
    assert b"alpha" not in body
    assert b"beta" not in body


@pytest.mark.parametrize("key", [b"", KEY])
@pytest.mark.parametrize(
    ("begin", "again"),
    [
        pytest.param(b"GET /version HTTP/1.1\r\nhost: x\r\n", b"x-more: y\r\n" * 5_000, id="many headers"),
        pytest.param(b"GET /version HTTP/1.1\r\nhost: x\r\nx-more: ", b"y" * 60_000, id="a long header"),
        pytest.param(b"GET /version?", b"y" * 60_000, id="a long path"),
        pytest.param(b"GET", b" " * 60_000, id="no path"),
        pytest.param(b"", b"\r\n" * 30_000, id="nothing"),
        pytest.param(b"", bytes(range(128, 256)) * 500, id="no HTTP"),
    ],
)
def test_a_flood_is_cut_off(case: Case, key: bytes, begin: bytes, again: bytes) -> None:
    begin = begin.replace(b"host: x\r\n", b"host: x\r\n" + key)
    told = answers(case, [begin, *repeat(again, MAX_TAKEN // len(again))])
    assert told[:12] in (b"", b"HTTP/1.1 400")


@pytest.mark.parametrize(("key", "status"), [(KEY, b"413"), (b"", b"401")])
def test_a_body_without_an_end_is_refused_while_it_comes(case: Case, key: bytes, status: bytes) -> None:
    kind = b"content-type: application/json\r\ntransfer-encoding: chunked\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%s%s\r\n"
    chunk = b"2710\r\n" + b" " * 10_000 + b"\r\n"
    with connected(case) as client:
        with contextlib.suppress(ConnectionError):  # once it has said so it may hang up at any time
            client.sendall(head % (key, kind))
            for _ in range(MAX_TAKEN // len(chunk)):
                client.sendall(chunk)
                if select.select([client], [], [], 0.01)[0]:
                    break
        assert client.recv(65_536)[9:12] == status
