"""A file of requests becomes a file of results: one for each, whatever happens in between."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from server_case import ENGINE
from tiny_model import write_tiny_model

from kv_execution import PagedEngine, SamplingParams
from kv_serving import cli
from kv_serving.server.batch import BatchReport, run_batch
from kv_serving.server.batch_file import BatchFileError, ResultFile
from kv_serving.server.run import Loaded
from models import load_model

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def request(index: int, **body: object) -> dict[str, object]:
    body = {"prompt": [5, 6, 7 + index], "max_tokens": 4, "temperature": 1.0, "seed": index, "ignore_eos": True, **body}
    return {"custom_id": f"r{index}", "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def read(path: Path) -> dict[str, dict[str, object]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    model = load_model(write_tiny_model(tmp_path_factory.mktemp("tiny")))
    return Loaded(model, PagedEngine(model, ENGINE))


def run(loaded: Loaded, source: Path, target: Path) -> BatchReport:
    engine = loaded.engine
    engine.init_paged_runtime()
    seen: list[tuple[int, int]] = []
    report = run_batch(source, target, lambda: loaded, "tiny", lambda *counts: seen.append(counts))
    assert seen == [(done, report.requests) for done in range(report.already_done, report.requests + 1)]
    assert report.already_done == report.requests or engine.stats().pages_in_use == 0
    return report


def test_every_request_has_one_result_with_its_own_status(loaded: Loaded, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 3}
    lines = [
        *(request(index) for index in range(12)),
        request(12, max_tokens="many"),
        request(13, prompt=[9999]),
        request(14, stream=True),
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
    ]
    assert run(loaded, write(tmp_path / "in", lines), tmp_path / "out") == (16, 0, 3)
    results = read(tmp_path / "out")
    status = {name: line["response"]["status_code"] for name, line in results.items()}
    assert status == {**{f"r{index}": 200 for index in range(12)}, "r12": 422, "r13": 400, "r14": 400, "chat": 200}
    assert results["chat"]["response"]["body"]["object"] == "chat.completion"
    model, engine = loaded
    for index in range(3):
        params = SamplingParams(max_tokens=4, temperature=1.0, seed=index, ignore_eos=True)
        (expected,) = engine.generate([[5, 6, 7 + index]], params)
        text = model.tokenizer.decode([token for token in expected.tokens if token < model.tokenizer.vocab_size])
        assert results[f"r{index}"]["response"]["body"]["choices"][0]["text"] == text


def test_results_that_are_there_are_kept_and_a_torn_line_is_asked_again(loaded: Loaded, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request(index) for index in range(6)])
    run(loaded, source, tmp_path / "out")
    lines = (tmp_path / "out").read_bytes().splitlines(keepends=True)
    (tmp_path / "out").write_bytes(b"".join(lines[:3]) + lines[3][:20])
    assert run(loaded, source, tmp_path / "out") == (6, 3, 0)
    assert (tmp_path / "out").read_bytes().startswith(b"".join(lines[:3]))
    assert set(read(tmp_path / "out")) == {f"r{index}" for index in range(6)}
    assert run(loaded, source, tmp_path / "out") == (6, 6, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 is not an object"),
        ('{"custom_id": 7}', "custom_id is 7"),
        ('{"custom_id": "a", "url": "/v1/embeddings"}', "is not to be had"),
        ('{"custom_id": "a", "url": "/v1/completions"}\n' * 2, "line 2: custom_id 'a' is there already"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_before_anything_runs(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "in").write_text(content)
    with pytest.raises(BatchFileError, match=message):
        run_batch(tmp_path / "in", tmp_path / "out", lambda: pytest.fail("loaded"), "x", lambda *_: None)
    assert not (tmp_path / "out").exists()


def test_a_file_of_something_else_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "out").write_text('{"my": "data"}\n')
    with pytest.raises(BatchFileError, match="is no result of a batch"):
        ResultFile(tmp_path / "out")
    assert (tmp_path / "out").read_text() == '{"my": "data"}\n'


@pytest.mark.parametrize("content", ['{"custom_id": "a", "url": "/v1/completions"}\n', "notes without a line's end"])
def test_lines_that_are_no_results_are_refused_and_kept(tmp_path: Path, content: str) -> None:
    (tmp_path / "out").write_text(content)
    with pytest.raises(BatchFileError, match="line 1 is no result of a batch"):
        ResultFile(tmp_path / "out")
    assert (tmp_path / "out").read_text() == content


def test_requests_are_not_their_own_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(write(tmp_path / "same", [request(1)]))
    assert cli.run(["batch", "model", source, source]) == 2
    assert "is the file of requests" in capsys.readouterr().err


def test_a_missing_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["batch", "model", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_a_batch_that_is_killed_goes_on_with_nothing_lost_or_repeated(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "tiny")
    source = write(tmp_path / "in", [request(index, max_tokens=40) for index in range(300)])
    command = [sys.executable, "-c", "from kv_serving.cli import main; main()", "batch", str(directory), str(source)]
    command += [str(tmp_path / "out"), "--max-requests", "4", "--max-context", "64", "--kv-pool-bytes", "4MiB"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"}
    for _ in range(3):
        child = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        had = size_of(tmp_path / "out")
        while child.poll() is None and size_of(tmp_path / "out") < had + 9000:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
    subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, check=True)
    assert set(read(tmp_path / "out")) == {f"r{index}" for index in range(300)}
