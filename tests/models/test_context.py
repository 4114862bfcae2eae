"""A model is loaded for a context, and turns every position with the frequencies of sequences of that length."""

import logging
from pathlib import Path

import numpy as np
import pytest
from dense_step import DenseModel
from family_gguf import write_family_gguf
from long_rope import DYNAMIC_CASE, LONGROPE, LONGROPE_CASE, ORIGINAL, LongCase, plain_logits_of, write_long_case

from models import ContextError, ModelConfigError, load_model

LONG = np.random.default_rng(3).integers(3, 320, 48)


def longrope_gguf(directory: Path, path: Path, **changes: np.ndarray) -> Path:
    """The longrope case as llama.cpp's converter writes it."""
    factors = {
        "rope_factors_short.weight": np.array(LONGROPE["short_factor"], np.float32),
        "rope_factors_long.weight": np.array(LONGROPE["long_factor"], np.float32),
    }
    attention_factor = float(np.sqrt(1 + np.log(128 / ORIGINAL) / np.log(ORIGINAL)))
    metadata = {"phi3.rope.scaling.attn_factor": attention_factor}
    return write_family_gguf(directory, path, metadata=metadata, extra=factors | changes)


def assert_close(logits: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("case", [LONGROPE_CASE, DYNAMIC_CASE], ids=["longrope", "dynamic"])
def test_a_long_sequence_has_the_logits_of_a_whole_computation(golden: Path, tmp_path: Path, case: LongCase) -> None:
    directory = write_long_case(golden, tmp_path, case)
    model = load_model(directory, max_context=len(LONG))
    assert model.spec.max_context == len(LONG)
    assert_close(DenseModel(model, len(LONG)).logits(LONG), plain_logits_of(directory, LONG))


@pytest.mark.parametrize("case", [LONGROPE_CASE, DYNAMIC_CASE], ids=["longrope", "dynamic"])
def test_a_model_has_the_context_of_short_sequences_unless_asked(
    golden: Path, tmp_path: Path, case: LongCase, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_long_case(golden, tmp_path, case)
    with caplog.at_level(logging.WARNING):
        model = load_model(directory)
    assert [record.getMessage() for record in caplog.records] == [
        f"{case.name}: the context is 32 tokens; max_context (--max-context) makes it up to 128, with the frequencies "
        "of long sequences"
    ]
    assert model.spec.max_context == ORIGINAL
    short = LONG[:ORIGINAL]
    assert_close(DenseModel(model, ORIGINAL).logits(short), plain_logits_of(directory, short))


def test_longrope_in_a_gguf_has_both_sets_of_factors(golden: Path, tmp_path: Path) -> None:
    directory = write_long_case(golden, tmp_path, LONGROPE_CASE)
    path = longrope_gguf(directory, tmp_path / "long.gguf")
    short = load_model(path)
    assert short.spec.max_context == ORIGINAL
    assert_close(DenseModel(short, 24).logits(LONG[:24]), plain_logits_of(directory, LONG[:24]))
    long = load_model(path, max_context=128)
    assert_close(DenseModel(long, len(LONG)).logits(LONG), plain_logits_of(directory, LONG))


def test_a_context_within_the_short_one_changes_no_frequency(golden: Path, tmp_path: Path) -> None:
    directory = write_long_case(golden, tmp_path, LONGROPE_CASE)
    own, less, more, most = (load_model(directory, max_context=each) for each in (None, 16, 33, 128))
    assert less.spec.max_context == 16
    assert less.fingerprint == own.fingerprint
    assert more.fingerprint == most.fingerprint
    assert own.fingerprint != more.fingerprint


def test_dynamic_scaling_is_another_model_at_each_length(golden: Path, tmp_path: Path) -> None:
    directory = write_long_case(golden, tmp_path, DYNAMIC_CASE)
    prints = [load_model(directory, max_context=each).fingerprint for each in (None, 32, 33, 64)]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize("wanted", [0, 1, 129, 1 << 40])
def test_a_context_that_the_model_does_not_have_is_refused_with_the_numbers(
    golden: Path, tmp_path: Path, wanted: int
) -> None:
    directory = write_long_case(golden, tmp_path, LONGROPE_CASE)
    for source in (directory, longrope_gguf(directory, tmp_path / "long.gguf")):
        with pytest.raises(ContextError, match=f"max_context is {wanted}, the model takes 2 to 128 tokens"):
            load_model(source, max_context=wanted)


def test_a_model_without_such_a_rotation_takes_what_its_file_states(golden: Path) -> None:
    assert load_model(golden / "llama", max_context=100).spec.max_context == 100
    with pytest.raises(ContextError, match="takes 2 to 512 tokens"):
        load_model(golden / "llama", max_context=513)


def test_short_factors_alone_stretch_nothing(golden: Path, tmp_path: Path) -> None:
    directory = write_long_case(golden, tmp_path, LONGROPE_CASE)
    short = {"rope_factors_short.weight": np.ones(8, np.float32)}
    path = write_family_gguf(directory, tmp_path / "short.gguf", extra=short)
    with pytest.raises(ContextError, match="takes 2 to 32 tokens"):
        load_model(path, max_context=48)


@pytest.mark.parametrize(
    ("numbers", "named"), [([1.0] * 7, "7 frequency factors"), ([0.0] * 8, "long frequency factor 0 is 0")]
)
def test_long_factors_that_do_not_fit_are_refused(golden: Path, tmp_path: Path, numbers: list, named: str) -> None:
    directory = write_long_case(golden, tmp_path, LONGROPE_CASE)
    path = longrope_gguf(
        directory, tmp_path / "long.gguf", **{"rope_factors_long.weight": np.array(numbers, np.float32)}
    )
    with pytest.raises(ModelConfigError, match=named):
        load_model(path)


def test_half_a_pair_of_a_head_is_made_whole(golden: Path, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.7}  # 11 of 16
    directory = write_long_case(golden, tmp_path, LongCase("phi3", {"rope_parameters": rope}))
    assert_close(DenseModel(load_model(directory), len(LONG)).logits(LONG), plain_logits_of(directory, LONG))
