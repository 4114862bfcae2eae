"""lm-eval's local-completions client: what it sends is answered with the engine's own log-probabilities.

The client itself brings half a gigabyte of libraries, so it runs where it is installed (`pip install 'lm_eval[api]'
transformers`); its requests and its way of reading the answers are tested everywhere.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from server_case import ENGINE, Case, running_server

pytestmark = pytest.mark.slow
QUESTIONS = [("the rest of", [" it", " the sea"]), ("and then the other", [" end", " one", " thing in the"])]
TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: 0
doc_to_choice: choices
target_delimiter: ""
metric_list: [{metric: acc}]
"""


class Likelihood(NamedTuple):
    """Of a continuation: its log-probability, and whether each of its tokens is the likeliest one."""

    logprob: float
    is_greedy: bool


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    config = dataclasses.replace(ENGINE, max_step_tokens=16)
    with running_server(tmp_path_factory.getbasetemp() / "lm_eval", config=config) as running:
        yield running


def split(case: Case, context: str, continuation: str) -> tuple[list[int], int]:
    """Token ids of both together, and how many of them are the context's."""
    return case.model.tokenizer.encode(context + continuation), len(case.model.tokenizer.encode(context))


def own(case: Case, context: str, continuation: str) -> Likelihood:
    """What the engine says."""
    ids, given = split(case, context, continuation)
    logprobs = case.engine.score(ids)[given - 1 : len(ids) - 1]
    tokens = np.array(ids[given:])
    return Likelihood(float(logprobs[range(len(tokens)), tokens].sum()), bool((logprobs.argmax(1) == tokens).all()))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_its_requests_are_answered_with_the_engines_own_likelihoods(case: Case, batch_size: int) -> None:
    asked = [(context, choice) for context, choices in QUESTIONS for choice in choices]
    # One whose continuation is what the model itself would say.
    greedy = case.post("/v1/completions", prompt="the", max_tokens=3, temperature=0)["choices"][0]["text"]
    asked = [*asked, ("the", greedy)]
    told = []
    for start in range(0, len(asked), batch_size):
        prompts, given = zip(*(split(case, *each) for each in asked[start : start + batch_size]), strict=True)
        body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1}
        answer = case.post("/v1/completions", seed=1234, echo=True, **body)
        for choice, context in zip(sorted(answer["choices"], key=lambda each: each["index"]), given, strict=True):
            scores = choice["logprobs"]
            logprobs = scores["token_logprobs"][context:-1]  # the last is the token that was generated
            likeliest = [max(top.values()) for top in scores["top_logprobs"][context:-1]]
            told.append(Likelihood(sum(logprobs), logprobs == likeliest))
    case.settle()
    expected = [own(case, *each) for each in asked]
    assert [each.logprob for each in told] == pytest.approx([each.logprob for each in expected], abs=1e-4)
    assert [each.is_greedy for each in told] == [each.is_greedy for each in expected]
    assert {each.is_greedy for each in expected} == {True, False}


@pytest.mark.parametrize(("batch_size", "at_once"), [(4, 1), (1, 4)])
def test_the_client_itself_finds_the_engines_own_likelihoods(
    case: Case, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, batch_size: int, at_once: int
) -> None:
    for library in ("lm_eval", "transformers", "tenacity"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed: pip install 'lm_eval[api]' transformers")
    data = tmp_path / "data.json"
    data.write_text("".join(json.dumps({"question": text, "choices": of}) + "\n" for text, of in QUESTIONS))
    (tmp_path / "tiny.yaml").write_text(TASK.replace("DATA", str(data)))
    command = [sys.executable, "-m", "lm_eval", "--model=local-completions", "--tasks=tiny"]
    command += [
        f"--include_path={tmp_path}",
        f"--output_path={tmp_path}",
        "--log_samples",
        f"--batch_size={batch_size}",
    ]
    url, tokenizer = f"{case.server.url}/v1/completions", tmp_path_factory.getbasetemp() / "lm_eval"
    arguments = f"model=tiny,base_url={url},tokenizer={tokenizer},tokenizer_backend=huggingface,max_length=128"
    command += [f"--model_args={arguments},num_concurrent={at_once}"]
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    (samples,) = tmp_path.rglob("samples_tiny_*.jsonl")
    told = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda each: each["doc_id"])
    case.settle()
    for (context, choices), sample in zip(QUESTIONS, told, strict=True):
        for choice, (logprob, is_greedy) in zip(choices, sample["filtered_resps"], strict=True):
            expected = own(case, context, choice)
            assert float(logprob) == pytest.approx(expected.logprob, abs=1e-4)
            assert (is_greedy in (True, "True")) == expected.is_greedy
