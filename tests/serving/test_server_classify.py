"""/classify: labels and probabilities, under vLLM's names, of a model that classifies."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from server_case import ENGINE, Case, running_server
from tiny_model import write_tiny_model

from kv_execution import PagedEngine
from kv_serving.server.classification import probabilities
from kv_serving.server.run import Loaded
from models import load_model

TEXTS = ["the rest", "and then some more of it, one after another", "in"]
LABELS = ["bad", "middling", "good"]


def write_classifier(to: Path) -> Path:
    """The tiny model with a head of three labels in the place of its output matrix."""
    write_tiny_model(to)
    tensors = load_file(to / "model.safetensors")
    del tensors["lm_head.weight"]
    width = tensors["model.norm.weight"].size
    tensors["score.weight"] = np.random.default_rng(0).standard_normal((len(LABELS), width)).astype(np.float32)
    save_file(tensors, to / "model.safetensors")
    fields = json.loads((to / "config.json").read_text())
    fields |= {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {str(number): label for number, label in reversed(list(enumerate(LABELS)))},
    }
    (to / "config.json").write_text(json.dumps(fields))
    return to


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    model = load_model(write_classifier(tmp_path_factory.mktemp("classifier")))
    engine = PagedEngine(model, ENGINE)

    def load() -> Loaded:
        engine.init_paged_runtime()
        engine.warmup_paged(constrained=True)
        return Loaded(model, engine)

    with running_server(tmp_path_factory.mktemp("tiny"), load) as running:
        while running.http.get("/ready").status_code != 200:
            pass
        yield running._replace(model=model, engine=engine)


def test_each_input_gets_its_label_and_probabilities(case: Case) -> None:
    prompts = [case.model.tokenizer.encode(text) for text in TEXTS]
    answer = case.post("/classify", input=TEXTS, model="tiny")
    tokens = sum(map(len, prompts))
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["id"].startswith("classify-")
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    case.settle()
    scores = case.engine.classify(prompts)
    for index, entry in enumerate(answer["data"]):
        assert (entry["index"], entry["num_classes"]) == (index, 3)
        assert entry["label"] == LABELS[int(scores[index].argmax())]
        np.testing.assert_allclose(entry["probs"], np.exp(scores[index]) / np.exp(scores[index]).sum(), atol=1e-5)


def test_without_the_activation_the_scores_come_as_they_are(case: Case) -> None:
    prompts = [[5, 6, 7], list(range(5, 105))]
    answer = case.post("/classify", input=prompts, use_activation=False)
    case.settle()
    np.testing.assert_allclose([each["probs"] for each in answer["data"]], case.engine.classify(prompts), atol=1e-5)
    assert case.post("/classify", input=prompts, activation=False)["data"] == answer["data"]


def test_a_classifier_is_warm_once_it_is_ready(case: Case) -> None:
    case.settle()
    traces = case.stats.traces
    for count in (1, 2, 5):
        case.post("/classify", input=[list(range(5, 100))] * count)
    case.settle()
    assert case.stats.traces == traces


def test_it_gives_vectors_and_generates_nothing(case: Case) -> None:
    assert len(case.post("/v1/embeddings", input="the")["data"][0]["embedding"]) == 64
    for path, body in (
        ("/v1/completions", {"prompt": "the"}),
        ("/v1/completions", {"prompt": "the", "echo": True, "logprobs": 1, "max_tokens": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the"}]}),
    ):
        assert "classifies sequences with 3 labels" in case.post(path, 400, **body)["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"input": []}, 400, "there is no input"),
        ({"input": [[5], []]}, 400, "an input is empty"),
        ({"input": "the", "model": "other"}, 404, "there is no model 'other'"),
        ({"input": "the", "dimensions": 3}, 422, "dimensions"),
        ({}, 422, "input"),
    ],
)
def test_what_cannot_be_classified_is_refused(case: Case, body: dict, status: int, message: str) -> None:
    assert message in case.post("/classify", status, **body)["error"]["message"]


def test_a_model_that_generates_has_no_labels(tmp_path: Path) -> None:
    with running_server(tmp_path) as case:
        error = case.post("/classify", 400, input="the")["error"]
    assert error["message"] == "tiny is no classifier: ask it for completions or embeddings"


def test_one_label_is_a_yes_or_no() -> None:
    scores = np.array([[0.0], [200.0], [-200.0]], np.float32)
    np.testing.assert_allclose(probabilities(scores), [[0.5], [1], [0]])
