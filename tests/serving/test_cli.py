"""The command line: what goes to which stream, and one line with exit status 2 for everything a user can get wrong."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import serving_fakes
from long_rope import LONGROPE_CASE, write_long_case
from patience import HANG_S
from safetensors.numpy import load_file, save_file
from serving_fakes import FakeBatcher
from tiny_model import write_tiny_model

from kv_common import __version__
from kv_serving import cli

REPOSITORY = Path(__file__).resolve().parent.parent.parent
GOLDEN = REPOSITORY / "tests" / "data" / "golden"


@pytest.fixture
def parrot(monkeypatch: pytest.MonkeyPatch) -> FakeBatcher:
    """A model that answers the first request with `hello` and the second with `good bye`."""
    monkeypatch.setattr(cli, "open_model", cli.open_model)  # so that what install() replaces is put back
    monkeypatch.setattr(cli, "start_engine", cli.start_engine)
    return serving_fakes.install(["hello", "good bye"])


def run_child(code: str, *arguments: str, stdout: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    # As in the foreground of a shell, though the tests may run in its background.
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {code}"
    environment = {"PYTHONPATH": f"{REPOSITORY}:{Path(__file__).parent}", "JAX_PLATFORMS": "cpu", "PATH": ""}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_one_prompt_prints_its_text_and_the_facts_apart(
    parrot: FakeBatcher, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["generate", "parrot", "--prompt", "hi", "--seed", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "hello\n"
    assert captured.err.startswith("generated 6 tokens; prefill ")
    assert captured.err.endswith("; 3 of 20 pages used; provider reference on cpu\n")
    assert parrot.submitted[0][1].seed == 3


def test_several_prompts_are_one_batch_under_headings(parrot: FakeBatcher, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", "parrot", "--prompt", "hi", "--prompt", "two\nlines", "--stop", "bye"]) == 0
    assert capsys.readouterr().out == "== hi\nhello\n\n== two lines\ngood \n"
    assert parrot.steps <= 10


def test_json_is_one_object_and_nothing_else(parrot: FakeBatcher, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", "parrot", "--prompt", "hi", "--raw", "--max-tokens", "3", "--json"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["results"] == [
        {
            "prompt": "hi",
            "text": "hel",
            "finish_reason": "length",
            "prompt_tokens": 2,
            "tokens": [ord("h"), ord("e"), ord("l")],
        }
    ]
    assert answer["pages"] == {"peak": 3, "usable": 20, "tokens_per_page": 16}
    assert answer["provider"] == "reference"
    assert captured.err == ""


def test_chat_answers_line_by_line(
    parrot: FakeBatcher, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hi", "/exit"])
    monkeypatch.setattr(cli, "_read_line", lambda: next(lines))
    assert cli.run(["chat", "parrot"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "hello\n"
    assert captured.err.startswith("parrot. /reset begins")


def test_a_longer_context_is_asked_for_in_one_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_long_case(GOLDEN, tmp_path, LONGROPE_CASE))
    arguments = ["inspect", model, "--kv-pool-bytes", "1MiB"]
    assert cli.run([*arguments, "--max-context", "64"]) == 0
    assert "64 tokens, 4 pages" in capsys.readouterr().out
    assert cli.run([*arguments, "--max-context", "129"]) == 2
    assert "jaxkv: phi3: max_context is 129, the model takes 2 to 128 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "parrot"], "there is no prompt: give --prompt TEXT"),
        (["generate", "parrot", "--prompt", ""], "the prompt is empty"),
        (["generate", "parrot", "--prompt", "x" * 200], "the prompt has 206 tokens"),
        (["generate", "parrot", "--prompt", "x", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "parrot", "--prompt", "x", "--max-tokens", "many"], "Invalid value for '--max-tokens'"),
        (["generate", "parrot", "--prompt", "x", "--temperature", "nan"], "temperature is nan"),
        (["generate", "parrot", "--prompt", "x", "--top-p", "2"], "top_p is 2"),
        (["generate", "parrot", "--prompt", "x", "--kv-pool-bytes", "lots"], "'lots' is not a byte size"),
        (["generate", "parrot", "--prompt", "x", "--tokens-per-page", "0"], "tokens_per_page is 0"),
        (["generate", "parrot", "--prompt", "x", "--stop", ""], "a stop string is empty"),
        (["generate", "parrot", "--prompt", "x", "--raw", "--system", "y"], "a raw prompt has no system message"),
        (["chat", "parrot", "--kv-pool-bytes", "0"], "'0' is less than one byte"),
        (["generate"], "Missing argument 'MODEL'"),
        (["embed", "parrot"], "there is no prompt: give --prompt TEXT"),
        (["embed", "parrot", "--prompt", ""], "the prompt is empty"),
        (["generate", "parrot", "--promt", "x"], "No such option"),
        (["generat"], "No such command 'generat'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    parrot: FakeBatcher, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"jaxkv: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["inspect"], ["chat"]])
def test_a_model_that_is_not_there_is_one_line_and_status_2(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = str(tmp_path / "no-model.gguf")
    assert cli.run([*command, missing]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"jaxkv: {missing}")
    assert captured.err.count("\n") == 1


def test_logits_that_are_nan_are_one_line_and_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    weights = write_tiny_model(tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, weights)
    assert cli.run(["generate", str(tmp_path), "--prompt", "x", "--raw", "--kv-pool-bytes", "1MiB"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("jaxkv: the model's logits are not numbers: weights or")


def test_a_file_that_cannot_be_read_is_one_line(
    parrot: FakeBatcher, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "secret.gguf")

    monkeypatch.setattr(cli, "open_model", refuse)
    assert cli.run(["inspect", "secret.gguf"]) == 2
    assert capsys.readouterr().err == "jaxkv: Permission denied: secret.gguf\n"


def test_ctrl_c_exits_with_130(parrot: FakeBatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "open_model", interrupt)
    assert cli.run(["generate", "parrot", "--prompt", "x"]) == 130


def test_ctrl_c_while_the_imports_are_on_their_way_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import time; print('importing', flush=True); time.sleep(3600)")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from kv_serving.console_script import main; main()"
    child = run_child(code, "--help")
    assert child.stdout is not None
    assert child.stdout.readline() == "importing\n"
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=HANG_S) == ("", "")
    assert child.returncode == -signal.SIGINT


def test_ctrl_c_is_the_command_s_again_once_all_is_imported() -> None:
    code = (
        "import os, signal; from kv_serving import cli, console_script;"
        "cli.run = lambda: print(signal.getsignal(signal.SIGINT) is signal.default_int_handler) or 0;"
        "console_script.main()"
    )
    assert run_child(code).communicate(timeout=HANG_S) == ("True\n", "")


@pytest.mark.parametrize("command", [["generate", "nowhere", "--prompt", "x", "--adapter"], ["serve", "nowhere"]])
def test_an_adapter_that_is_not_there_is_told_before_the_model_is_loaded(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    option = str(tmp_path) if command[0] == "generate" else f"--adapter=poems={tmp_path}"
    assert cli.run([*command, option]) == 2
    assert capsys.readouterr().err == (
        f"jaxkv: {tmp_path} has no adapter_config.json: give the directory of a PEFT LoRA adapter\n"
    )


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxkv {__version__}\n"


def test_the_bare_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 0
    assert "generate" in capsys.readouterr().out


def test_help_and_version_do_not_import_jax() -> None:
    child = run_child("import sys, kv_serving.cli; print('jax' in sys.modules)")
    assert child.communicate(timeout=HANG_S) == ("False\n", "")


def test_a_closed_pipe_is_quiet() -> None:
    code = "import serving_fakes; serving_fakes.install(['word ' * 5000]); from kv_serving.cli import main; main()"
    nobody, writer = os.pipe()
    os.close(nobody)
    child = run_child(code, "generate", "parrot", "--prompt", "x", "--max-tokens", "20000", stdout=writer)
    os.close(writer)
    assert child.communicate(timeout=HANG_S) == (None, "")
    assert child.returncode in (0, 1)


@pytest.mark.slow
def test_a_real_model_generates_from_the_command_line(smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", "What is the capital of France?", "--max-tokens", "12", "--kv-pool-bytes", "64MiB"]
    assert cli.run(["generate", str(smollm2_gguf), *arguments]) == 0
    captured = capsys.readouterr()
    assert "Paris" in captured.out
    assert "pages used" in captured.err
