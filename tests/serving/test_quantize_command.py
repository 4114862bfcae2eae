"""`jaxkv quantize`: the copy, its perplexity beside the original's, and refusals before anything is written."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.random_llama import write_random_llama
from kv_serving import cli
from kv_serving.perplexity import WINDOW_TOKENS, Perplexity, TextError, perplexity_of
from kv_serving.quantize_command import difference_line

WORDS = ["one", "two", "three", "four"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A random model of 96 tokens, of which four are words."""
    directory = write_random_llama(tmp_path / "model", layers=1, max_position_embeddings=1024)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="one"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(WORDS[number] for number in np.random.default_rng(1).integers(0, 4, 300)))
    return path


def test_it_writes_the_copy_and_prints_what_it_costs(
    source: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "copy"
    assert cli.run(["quantize", str(source), str(target), "--kind", "q4_0", "--text", str(text)]) == 0
    wrote, cost = capsys.readouterr().out.splitlines()
    assert wrote.startswith(f"wrote {target}: 7 matrices in q4_0, ")
    before, after = (
        perplexity_of(str(path), text.read_text(), "float32", lambda done, total: None) for path in (source, target)
    )
    assert before.value != after.value
    assert cost == difference_line(before, after)
    assert cost.endswith(f"over {299 - 1} tokens in windows of {WINDOW_TOKENS}")


def test_the_difference_is_that_of_the_two() -> None:
    line = difference_line(Perplexity(8.0, 100, 256), Perplexity(8.5, 100, 256))
    assert line == "perplexity 8.0000 before, 8.5000 after: +0.5000 (+6.25%), over 100 tokens in windows of 256"


def test_a_model_that_prefers_nothing_is_as_perplexed_as_its_vocabulary_is_large(source: Path, text: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"lm_head.weight": np.zeros_like(tensors["lm_head.weight"])}, source / "model.safetensors")
    seen: list[tuple[int, int]] = []
    score = perplexity_of(str(source), text.read_text(), "float32", lambda *progress: seen.append(progress))
    assert score.value == pytest.approx(96, rel=1e-6)
    assert (score.tokens, score.window) == (298, WINDOW_TOKENS)
    assert seen == [(1, 2), (2, 2)]


def test_tokens_are_scored_from_the_start_of_their_own_window(source: Path, text: Path) -> None:
    words = text.read_text().split()
    first, second = " ".join(words[:WINDOW_TOKENS]), " ".join(words[WINDOW_TOKENS:])
    whole, *parts = (
        perplexity_of(str(source), each, "float32", lambda done, total: None)
        for each in (text.read_text(), first, second)
    )
    mean = sum(np.log(part.value) * part.tokens for part in parts) / sum(part.tokens for part in parts)
    assert np.log(whole.value) == pytest.approx(mean, rel=1e-6)


def test_a_text_too_short_is_named(source: Path) -> None:
    with pytest.raises(TextError, match="the text has 1 tokens, scoring takes two at least"):
        perplexity_of(str(source), "one", "float32", lambda done, total: None)


@pytest.mark.parametrize(
    ("target", "options", "complaint"),
    [
        ("model", [], "model exists: give a target that does not"),
        ("model", ["--force"], "model exists: give a target that does not; no directory is replaced"),
        ("copy.gguf", [], "copy.gguf: the copy of model is a directory, as its source is"),
        ("copy", ["--kind", "q3_k"], "'q3_k' is no kind that a directory can be written in: use q8_0, q4_0"),
        ("copy", ["--text", "binary"], "binary is not UTF-8 text (byte 0): give a text file"),
        ("copy", ["--text", "nowhere"], "No such file or directory: nowhere"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_written(
    source: Path, target: str, options: list[str], complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(source.parent)
    Path("binary").write_bytes(b"\xff\xfe\x00")
    before = sorted(source.parent.iterdir())
    assert cli.run(["quantize", "model", target, *options]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert sorted(source.parent.iterdir()) == before
    shutil.rmtree(source)
    assert cli.run(["quantize", "model", "copy"]) == 2
    assert "model: no such file or directory" in capsys.readouterr().err
