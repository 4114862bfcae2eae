"""Schemathesis over the served OpenAPI description: nothing that it makes up is a 500 or an undocumented status."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import HANG_S
from server_case import ENGINE, Case, running_server

from kv_serving.server.limits import Limits

HERE = Path(__file__).resolve().parent
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
FUZZ = (
    "from schemathesis.cli import schemathesis; schemathesis()",
    "run",
    "--checks=not_a_server_error,status_code_conformance,content_type_conformance",
    "--generation-database=none",
    "--seed=1",
    "--no-color",
    f"--request-timeout={HANG_S:g}",
    "--suppress-health-check=all",
    "--no-shrink",
    "--warnings=off",
)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    limits = Limits(max_body_bytes=20_000, max_tokens=16, max_choices=2, deadline_s=20)
    config = dataclasses.replace(ENGINE, max_requests=2, max_step_tokens=16)  # few shapes to compile
    with running_server(tmp_path_factory.mktemp("tiny"), config=config, limits=limits) as running:
        yield running


def fuzz(case: Case, directory: Path, *options: str, hooks: bool = False) -> None:
    """Run it in `directory`, so that no configuration of anybody's is read."""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    if hooks:
        environment["SCHEMATHESIS_HOOKS"] = "fuzz_hooks"
    command = [sys.executable, "-c", *FUZZ, *options, f"{case.server.url}/openapi.json"]
    ran = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    case.settle()


def answered(case: Case, path: str) -> int:
    """How many requests had an answer."""
    wanted = f'jaxkv:http_requests_total{{method="POST",path="{path}",status="200"}} '
    counts = [line.removeprefix(wanted) for line in case.http.get("/metrics").text.splitlines() if wanted in line]
    return int(float(counts[0])) if counts else 0


def test_a_few_bodies_are_no_fault_of_the_server(case: Case, tmp_path: Path) -> None:
    fuzz(case, tmp_path, "--phases=fuzzing", "--max-examples=5", "--include-path-regex=^/v1/(completions|models)")


@pytest.mark.slow
def test_no_body_is_a_fault_of_the_server(case: Case, tmp_path: Path) -> None:
    fuzz(case, tmp_path, "--max-examples=40")


@pytest.mark.slow
def test_no_body_that_is_answered_is_a_fault_of_the_server(case: Case, tmp_path: Path) -> None:
    before = [answered(case, path) for path in GENERATING]
    fuzz(case, tmp_path, "--max-examples=40", hooks=True)
    assert all(answered(case, path) - count > 50 for path, count in zip(GENERATING, before, strict=True))
