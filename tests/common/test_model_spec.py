"""ModelSpec: contradictory sizes are refused where the model is described."""

import dataclasses

import pytest

from kv_common import JaxkvError, ModelSpec, ModelSpecError

SPEC = ModelSpec(
    name="SmolLM2-135M",
    architecture="llama",
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    hidden_size=64,
    vocab_size=49152,
    max_context=8192,
    dtype="float32",
    num_parameters=134_515_008,
    parameter_bytes=538_060_032,
)


def test_query_heads_divide_into_kv_heads() -> None:
    assert SPEC.heads_per_kv_head == 3
    with pytest.raises(ModelSpecError, match="9 query heads do not divide into 2 K/V heads"):
        dataclasses.replace(SPEC, num_kv_heads=2)


@pytest.mark.parametrize("name", ["num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_context"])
def test_a_size_below_one_is_named(name: str) -> None:
    with pytest.raises(ModelSpecError, match=f"{name} is 0"):
        dataclasses.replace(SPEC, **{name: 0})


def test_every_named_error_is_a_value_error_for_callers_who_catch_that() -> None:
    assert issubclass(ModelSpecError, JaxkvError)
    assert issubclass(JaxkvError, ValueError)
