"""Every sampling parameter is checked where it is constructed, in one line with the number and the range."""

import dataclasses

import numpy as np
import pytest

from kv_common.errors import JaxkvError
from kv_execution.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
    SamplingParamsError,
    seed_words,
)


def test_the_defaults_are_greedy_and_ask_for_nothing() -> None:
    params = SamplingParams()
    assert params.is_greedy
    assert params.max_tokens == 16
    assert params.seed is None
    assert not params.logit_bias
    assert not params.logprobs
    assert not params.stop_token_ids


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("max_tokens", [1, 2**31 - 1], [0, -1, 2**31]),
        ("top_k", [0, 1, 2**31 - 1], [-1, 2**31]),
        ("top_logprobs", [0, MAX_TOP_LOGPROBS], [-1, MAX_TOP_LOGPROBS + 1]),
        ("temperature", [0, 1e-9, 2.0, 100.0], [-0.1, 100.1]),
        ("top_p", [0.0, 0.5, 1], [-0.1, 1.0001]),
        ("min_p", [0.0, 0.5, 1], [-0.1, 1.0001]),
        ("repetition_penalty", [0.01, 1, 100.0], [0.0, -1.0, 101.0]),
        ("presence_penalty", [-2.0, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2.0, 2], [-2.1, 2.1]),
        ("seed", [0, -(2**63), 2**63 - 1], [-(2**63) - 1, 2**63]),
        ("stop_token_ids", [(0, 5)], [(-1,), (2**31,)]),
        ("logit_bias", [{0: -100.0, 5: 100}], [{0: 100.1}, {0: -100.1}, {-1: 0.0}, {2**31: 0.0}]),
    ],
)
def test_the_ends_of_every_range_are_accepted_and_what_lies_beyond_is_refused(name, accepted, refused) -> None:
    for value in accepted:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(SamplingParamsError, match=f"{name}.* is .*: give .* from ") as error:
            SamplingParams(**{name: value})
        assert "\n" not in str(error.value)


REAL_NAMES = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]


@pytest.mark.parametrize("name", REAL_NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), "1", None, True, 1j])
def test_a_real_parameter_refuses_what_is_not_a_finite_number(name, value) -> None:
    with pytest.raises(SamplingParamsError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "top_logprobs", "seed"])
@pytest.mark.parametrize("value", [True, 1.0, "1", float("nan")])
def test_an_integer_parameter_refuses_bools_floats_and_strings(name, value) -> None:
    with pytest.raises(SamplingParamsError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["logprobs", "ignore_eos"])
def test_a_switch_takes_only_true_or_false(name) -> None:
    with pytest.raises(SamplingParamsError, match=f"{name} is 1: give True or False"):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize("bias", [{1: float("nan")}, {1: float("inf")}, {True: 1.0}, {"1": 1.0}, {1: "2"}, [(1, 2.0)]])
def test_a_logit_bias_of_the_wrong_kind_is_refused(bias) -> None:
    with pytest.raises(SamplingParamsError, match="logit_bias"):
        SamplingParams(logit_bias=bias)


def test_a_logit_bias_longer_than_the_limit_is_refused_with_the_numbers() -> None:
    SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0))
    with pytest.raises(SamplingParamsError, match=r"301 entries: give at most 300"):
        SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0))


@pytest.mark.parametrize("stop", ["12", b"12", 5, (1.0,), (True,)])
def test_stop_token_ids_must_be_a_collection_of_integers(stop) -> None:
    with pytest.raises(SamplingParamsError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=stop)


def test_the_value_does_not_change_with_the_objects_it_was_made_of() -> None:
    bias, stop = {1: 2.0}, [3]
    params = SamplingParams(logit_bias=bias, stop_token_ids=stop)  # type: ignore[arg-type]
    bias[1], stop[0] = 9.0, 9
    assert params.logit_bias == {1: 2.0}
    assert params.stop_token_ids == (3,)
    with pytest.raises(TypeError):
        params.logit_bias[1] = 0.0  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


def test_numpy_numbers_become_plain_ones() -> None:
    params = SamplingParams(top_k=np.int32(3), temperature=np.float32(0.5), logit_bias={np.int64(1): np.float64(2)})
    assert type(params.top_k) is int
    assert type(params.temperature) is float
    assert [(type(token), type(bias)) for token, bias in params.logit_bias.items()] == [(int, float)]


def test_equal_parameters_are_equal_and_hash_alike() -> None:
    first, second = (SamplingParams(logit_bias={1: 2}, stop_token_ids=(4,)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != SamplingParams(logit_bias={1: 3})
    assert dataclasses.replace(first, top_k=2).logit_bias == {1: 2.0}


def test_top_logprobs_imply_logprobs() -> None:
    assert SamplingParams(top_logprobs=2).logprobs
    assert not SamplingParams().logprobs


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert SamplingParams(temperature=9e-6).is_greedy
    assert not SamplingParams(temperature=1e-5).is_greedy


@pytest.mark.parametrize("wrong", [{"logit_bias": {7: 1.0, 8: 1.0}}, {"stop_token_ids": (2, 8)}])
def test_token_ids_outside_the_vocabulary_are_named(wrong) -> None:
    params = SamplingParams(**wrong)
    params.check_vocabulary(9)
    with pytest.raises(SamplingParamsError, match=r"token id 8, the model knows 8 tokens: give ids from 0 to 7"):
        params.check_vocabulary(8)


def test_seed_words_are_the_two_halves_of_the_seed() -> None:
    assert seed_words(5) == (0, 5)
    assert seed_words(2**32 + 7) == (1, 7)
    assert seed_words(-1) == (0xFFFFFFFF, 0xFFFFFFFF)


def test_the_error_is_one_of_ours() -> None:
    assert issubclass(SamplingParamsError, JaxkvError)
