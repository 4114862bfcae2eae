"""The sampler against the goldens, a sorting reference, the laws of chance, and its neighbors."""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_execution.sampler_state import SamplerState, empty_sampler_state, record_tokens, set_request
from kv_execution.sampling import Sampled, SamplingInputs, process_logits, sample
from kv_execution.sampling_params import GREEDY_BELOW_TEMPERATURE, MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS, seed_words
from kv_kernels.reference import ReferenceProvider

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden" / "sampling"
SPEC = json.loads((GOLDEN / "spec.json").read_text())
PARAMETERS = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}

DTYPES = {float: np.float32, int: np.int32, bool: np.bool_}

NEUTRAL: dict[str, float | int | bool] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "bias_count": 0,
    "prompt_len": 0,
    "position": 0,
    "history_row": 0,
    "logprobs": True,
    "top_logprobs": 0,
}

# Compiling takes nearly all the time of these tests, so they share a few shapes.
NO_TOKENS = np.zeros(0, np.int32)
REQUESTS, MAX_CONTEXT, VOCAB_SIZE = 16, 64, 1021
sample_traces: Counter[tuple[int, ...]] = Counter()


@jax.jit
def jit_sample(logits: jax.Array, inputs: SamplingInputs, state: SamplerState) -> Sampled:
    sample_traces[logits.shape] += 1
    return sample(logits, inputs, state)


jit_process = jax.jit(process_logits)


def make_inputs(rows: int = 1, seed: Any = 0, **given_values: Any) -> SamplingInputs:
    """Neutral inputs but for what is given: a number for all rows or one per row."""
    columns = {
        name: np.broadcast_to(np.asarray(given_values.pop(name, neutral), DTYPES[type(neutral)]), rows)
        for name, neutral in NEUTRAL.items()
    }
    assert not given_values
    words = np.array([seed_words(int(one)) for one in np.broadcast_to(seed, rows)], np.uint32).reshape(rows, 2)
    return SamplingInputs(seed=words, **columns)  # type: ignore[arg-type]


def state_with_history(*histories: Any) -> SamplerState:
    state = empty_sampler_state(REQUESTS, MAX_CONTEXT)
    table = np.zeros(state.history.shape, np.int32)
    for row, history in enumerate(histories):
        table[row, : len(history)] = history
    return state._replace(history=jnp.asarray(table))


def softmax(logits: Any) -> np.ndarray:
    wide = np.asarray(logits, np.float64)
    weights = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, vocab_size)) * scale).astype(np.float32)


def same_bits(left: Any, right: Any) -> bool:
    return np.asarray(left).tobytes() == np.asarray(right).tobytes()


# --- goldens -----------------------------------------------------------------------------------------------------


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "expected.npz") as file:
        return dict(file)


@pytest.mark.parametrize("vector", SPEC["vectors"], ids=lambda vector: vector["name"])
def test_every_golden_probability_vector_is_met(vector) -> None:
    data, extended = golden(), "context" in vector
    prompt = data["prompt"]
    history = np.concatenate([prompt, data["generated_k"]]) if extended else prompt
    logits = data["logits_k" if extended else "logits_last"]
    parameters = {name: value for name, value in vector.items() if name in PARAMETERS}
    parameters.setdefault("temperature", 1.0)
    # The second row of two, so that the history row is not the logits row.
    inputs = make_inputs(1, prompt_len=len(prompt), position=len(history), history_row=1, **parameters)
    probabilities = softmax(jit_process(logits[None], inputs, state_with_history([], history)))[0]
    np.testing.assert_allclose(probabilities, data[vector["name"]], rtol=0, atol=1e-5)
    assert np.count_nonzero(probabilities) == vector["kept"]
    assert probabilities.argmax() == vector["argmax"]


def test_the_golden_vectors_ask_for_every_parameter() -> None:
    assert {name for vector in SPEC["vectors"] for name in vector} >= PARAMETERS


def test_log_probabilities_of_the_first_greedy_token_meet_the_golden() -> None:
    data = golden()
    sampled = jit_sample(data["logits_last"][None], make_inputs(top_logprobs=5), state_with_history())
    assert sampled.token[0] == data["greedy"][0]
    np.testing.assert_allclose(sampled.logprob, data["greedy_logprobs"][:1], atol=1e-5)
    for ids, logprobs in (("greedy_top5_ids", "greedy_top5_logprobs"), ("top5_ids", "top5_logprobs")):
        row = 0 if ids.startswith("greedy") else -1
        np.testing.assert_array_equal(sampled.top_ids[0, :5], data[ids][row])
        np.testing.assert_allclose(sampled.top_logprobs[0, :5], data[logprobs][row], atol=1e-5)


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "both"])
def test_greedy_tokens_follow_the_penalized_logits(name) -> None:
    data = golden()
    penalties = {
        "repetition": {"repetition_penalty": SPEC["params"]["rep"]},
        "presence": {"presence_penalty": SPEC["params"]["presence"]},
        "frequency": {"frequency_penalty": SPEC["params"]["frequency"]},
        "both": {
            "presence_penalty": SPEC["params"]["presence"],
            "frequency_penalty": SPEC["params"]["frequency"],
        },
    }[name]
    length = len(data["prompt"])
    inputs = make_inputs(prompt_len=length, position=length, **penalties)
    token = jit_sample(data["logits_last"][None], inputs, state_with_history(data["prompt"])).token
    assert token[0] == data[f"greedy_{name}"][0]


# --- filters against a reference that sorts ----------------------------------------------------------------------


def reference_kept(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens of one row stay, by sorting; float64; ties at a cut all stay."""
    kept = logits > -np.inf
    if 0 < top_k < len(logits):
        kept &= logits >= np.sort(logits)[-top_k]
    if top_p < 1:
        order = np.argsort(-np.where(kept, logits, -np.inf), kind="stable")
        reached = np.cumsum(softmax(np.where(kept, logits, -np.inf))[order]) >= top_p
        last = int(reached.argmax()) if reached.any() else len(logits) - 1
        kept &= logits >= logits[order[last]]
    return kept & (softmax(logits) >= min_p * softmax(logits).max())


# Few distinct levels, so that ties at the cuts are common, beside extremes and both zeros. No subnormals, which some
# devices flush to zero.
logit_values = st.one_of(
    st.integers(-4, 4).map(lambda level: level * 0.5),
    st.sampled_from([-np.inf, -0.0, 0.0, -1e30, 80.0, 1e-30]),
    st.floats(-20, 20, width=32).map(lambda value: value if abs(value) > 1e-30 else 0.0),
)


@st.composite
def filter_cases(draw: st.DrawFn) -> tuple[np.ndarray, dict[str, Any]]:
    rows, vocab_size = draw(st.sampled_from([(1, 1), (3, 8), (4, 33)]))
    flat = draw(st.lists(logit_values, min_size=rows * vocab_size, max_size=rows * vocab_size))
    logits = np.array(flat, np.float32).reshape(rows, vocab_size)
    logits[:, draw(st.integers(0, vocab_size - 1))] = draw(st.sampled_from([0.0, 1.0, 2.5]))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=rows, max_size=rows))

    return logits, {
        "top_k": column(st.sampled_from([0, 1, 2, 3, 7, vocab_size - 1, vocab_size, vocab_size + 1, 2**31 - 1])),
        "top_p": column(st.sampled_from([0.0, 1e-6, 0.1, 0.3, 0.5, 0.9, 0.999, 0.9999999, 1.0])),
        "min_p": column(st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0])),
        "temperature": column(st.sampled_from([0.25, 1.0, 2.0])),
    }


@cache
def no_history() -> SamplerState:
    """Made once, since it is compiled anew each time."""
    return state_with_history()


def assert_kept_as_by_sorting(logits: np.ndarray, parameters: dict[str, Any]) -> None:
    rows = logits.shape[0]
    processed = np.asarray(jit_process(logits, make_inputs(rows, **parameters), no_history()))
    # The temperatures are powers of two, so that dividing is exact here and there.
    tempered = logits / np.array(parameters["temperature"], np.float32)[:, None]
    for row in range(rows):
        top_k = parameters["top_k"][row]
        top_p, min_p = (np.float64(np.float32(parameters[name][row])) for name in ("top_p", "min_p"))
        # A sum that meets top_p to within rounding may fall on either side.
        fewest = reference_kept(tempered[row], top_k, top_p - 1e-6 if top_p < 1 else 1, min_p * (1 + 1e-6))
        most = reference_kept(tempered[row], top_k, top_p + 1e-6 if top_p < 1 else 1, min_p * (1 - 1e-6))
        kept = processed[row] > -np.inf
        # The reference's own rounding may reject the most likely token at min_p = 1.
        fewest |= tempered[row] == tempered[row].max()
        assert (fewest <= kept).all()
        assert (kept <= most | fewest).all()
        np.testing.assert_allclose(processed[row][kept], tempered[row][kept], rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(filter_cases())
def test_the_filters_keep_what_sorting_keeps(case) -> None:
    assert_kept_as_by_sorting(*case)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(filter_cases())
def test_the_filters_keep_what_sorting_keeps_in_many_cases(case) -> None:
    assert_kept_as_by_sorting(*case)


def test_tokens_that_tie_at_a_cut_all_stay() -> None:
    logits = np.array([[1.0, -1.0, -0.0, 0.0, -0.0, -2.0]], np.float32)
    for filters in ({"top_k": 2}, {"top_p": 0.6}):
        processed = jit_process(logits, make_inputs(temperature=1.0, **filters), state_with_history())
        assert (np.asarray(processed)[0] > -np.inf).tolist() == [True, False, True, True, True, False]


def test_top_p_of_zero_keeps_the_most_likely_token() -> None:
    inputs = make_inputs(4, temperature=1.0, top_p=0.0)
    processed = jit_process(random_logits(4, VOCAB_SIZE), inputs, state_with_history())
    assert (np.asarray(processed) > -np.inf).sum(axis=1).tolist() == [1, 1, 1, 1]


def test_top_p_over_a_large_flat_vocabulary_is_exact_to_the_fixed_point() -> None:
    logits = random_logits(2, 70_001, scale=0.01)
    logits[1, 17] = 16.0  # and one where the tail is nearly as heavy as the one likely token, near the smallest unit
    top_p = np.array([0.37, 0.999], np.float32)
    processed = jit_process(logits, make_inputs(2, temperature=1.0, top_p=top_p), state_with_history())
    kept = np.asarray(processed) > -np.inf
    probabilities = softmax(logits)
    np.testing.assert_allclose((probabilities * kept).sum(axis=1), top_p, atol=1e-4)
    for row in range(2):
        assert logits[row][kept[row]].min() > logits[row][~kept[row]].max()


# --- chance ------------------------------------------------------------------------------------------------------


def chi_square(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * len(tokens)
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any()
    possible = probabilities > 0
    return float(((counts - expected)[possible] ** 2 / expected[possible]).sum())


@pytest.mark.parametrize("varies", ["position", "seed"])
@pytest.mark.parametrize(
    "parameters", [{}, {"temperature": 0.6}, {"top_k": 6}, {"temperature": 1.5, "top_p": 0.8, "min_p": 0.05}]
)
def test_sampled_frequencies_match_the_processed_probabilities(varies, parameters) -> None:
    draws = 4096
    parameters = {"temperature": 1.0} | parameters
    logits = np.broadcast_to(random_logits(1, 12, seed=4, scale=0.8), (draws, 12))
    inputs = make_inputs(draws, **({"seed": 7} | parameters | {varies: np.arange(draws)}))
    probabilities = softmax(jit_process(logits, inputs, state_with_history()))[0]
    tokens = np.asarray(jit_sample(logits, inputs, state_with_history()).token)
    assert (probabilities * draws)[probabilities > 0].min() > 5
    # 11 degrees of freedom at most: 36 is exceeded once in 6000 trials, and the seed is fixed.
    assert chi_square(tokens, probabilities) < 36


def test_consecutive_positions_are_drawn_independently() -> None:
    draws = 4096
    logits = np.zeros((draws, 12), np.float32)
    tokens = np.asarray(
        jit_sample(
            logits, make_inputs(draws, seed=3, temperature=1.0, position=np.arange(draws)), state_with_history()
        ).token
    )
    # 143 degrees of freedom: 210 is exceeded once in 5000 trials.
    assert chi_square(tokens[:-1] * 12 + tokens[1:], np.full(144, 1 / 144)) < 210


def test_the_key_is_the_seed_folded_with_the_position() -> None:
    logits, seed, position = random_logits(1, VOCAB_SIZE), 1234, 77
    bits = jax.random.bits(jax.random.fold_in(jax.random.key(seed), position), (VOCAB_SIZE,), jnp.uint32)
    uniform = (np.asarray(bits, np.float64) + 0.5) / 2**32
    expected = np.argmax(logits[0] - np.log(-np.log1p(-uniform)))
    inputs = make_inputs(seed=seed, position=position, temperature=1.0)
    assert jit_sample(logits, inputs, state_with_history()).token[0] == expected


def test_every_bit_of_the_seed_and_the_position_matter() -> None:
    seeds = np.repeat([0, 1, 2**32, 2**62], 4)
    positions = np.tile([0, 1, 1000, 2**20], 4)
    inputs = make_inputs(16, seed=seeds, position=positions, temperature=1.0)
    tokens = jit_sample(np.zeros((16, VOCAB_SIZE), np.float32), inputs, state_with_history()).token
    assert len(set(tokens.tolist())) == 16


# --- neighbors ---------------------------------------------------------------------------------------------------


def everything(rows: int) -> dict[str, np.ndarray]:
    """Parameters of `rows` requests that ask for different things, some for all, some for nothing."""
    rng = np.random.default_rng(5)

    def some(values: np.ndarray, neutral: float) -> np.ndarray:
        return np.where(rng.random(rows) < 0.5, values, neutral)

    position = rng.integers(8, MAX_CONTEXT, rows)
    return {
        "temperature": some(rng.uniform(0.2, 2, rows), 0),
        "top_k": some(rng.integers(1, VOCAB_SIZE, rows), 0),
        "top_p": some(rng.uniform(0.2, 1, rows), 1),
        "min_p": some(rng.uniform(0, 0.2, rows), 0),
        "repetition_penalty": some(rng.uniform(0.7, 1.5, rows), 1),
        "presence_penalty": some(rng.uniform(-1, 1, rows), 0),
        "frequency_penalty": some(rng.uniform(-1, 1, rows), 0),
        "bias_count": some(rng.integers(1, 20, rows), 0),
        "prompt_len": position // 2,
        "position": position,
        "top_logprobs": some(rng.integers(1, MAX_TOP_LOGPROBS + 1, rows), 0),
        "seed": rng.integers(-(2**62), 2**62, rows),
        "history_row": rng.permutation(rows),
    }


def busy_state() -> SamplerState:
    rng = np.random.default_rng(6)
    # No id twice among the first ones, which are all that `everything` asks for.
    biased = np.stack([np.resize(rng.permutation(VOCAB_SIZE), MAX_LOGIT_BIAS) for _ in range(REQUESTS)])
    return SamplerState(
        history=jnp.asarray(rng.integers(0, VOCAB_SIZE, (REQUESTS, MAX_CONTEXT)), jnp.int32),
        bias_ids=jnp.asarray(biased, jnp.int32),
        bias_values=jnp.asarray(rng.normal(size=(REQUESTS, MAX_LOGIT_BIAS)), jnp.float32),
    )


@pytest.mark.usefixtures("fully_optimized")
def test_a_row_is_the_same_bit_for_bit_in_any_batch_at_any_place() -> None:
    # 1021 is prime: rows begin at every alignment, and no vector width divides them.
    rows = REQUESTS
    logits, state, parameters = random_logits(rows, VOCAB_SIZE), busy_state(), everything(rows)
    together = jit_sample(logits, make_inputs(rows, **parameters), state)
    processed = np.asarray(jit_process(logits, make_inputs(rows, **parameters), state))
    rng = np.random.default_rng(7)
    for size, times in ((1, 16), (4, 6), (16, 2)):
        for _ in range(times):
            chosen = rng.choice(rows, size, replace=False)
            inputs = make_inputs(size, **{name: column[chosen] for name, column in parameters.items()})
            apart = jit_sample(logits[chosen], inputs, state)
            assert same_bits(apart.token, np.asarray(together.token)[chosen])
            assert same_bits(apart.top_ids, np.asarray(together.top_ids)[chosen])
            assert same_bits(jit_process(logits[chosen], inputs, state), processed[chosen])
            # A log-probability divides by a float sum, whose order may follow the shape: it decides no token.
            np.testing.assert_allclose(apart.logprob, np.asarray(together.logprob)[chosen], atol=2e-6)
            np.testing.assert_allclose(apart.top_logprobs, np.asarray(together.top_logprobs)[chosen], atol=2e-6)


def test_a_row_that_asks_for_nothing_keeps_its_logits_beside_those_that_ask_for_everything() -> None:
    logits, state = random_logits(4, VOCAB_SIZE), busy_state()
    logits[:, :3] = [-0.0, -np.inf, 0.0]
    asks: dict[str, float] = {
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "bias_count": 30,
        "top_logprobs": 3,
    }
    for temperature in (0.0, 1.0):
        quiet = NEUTRAL | {"temperature": temperature}
        columns = {name: [quiet[name], value, value, value] for name, value in asks.items()}
        inputs = make_inputs(4, prompt_len=4, position=12, history_row=np.arange(4), **columns)
        processed = jit_process(logits, inputs, state)
        assert same_bits(processed[0], logits[0])
        assert not np.array_equal(processed[1], logits[1])
        sampled = jit_sample(logits, inputs, state)
        alone = make_inputs(1, prompt_len=4, position=12, temperature=temperature)
        assert sampled.token[0] == jit_sample(logits[:1], alone, state).token[0]
        assert (np.asarray(sampled.top_ids[0]) == -1).all()
        assert np.isneginf(sampled.top_logprobs[0]).all()


@pytest.mark.parametrize("neutral", [0, 1])
def test_a_padding_row_disturbs_nobody_and_yields_a_valid_token(neutral) -> None:
    logits, state = random_logits(4, VOCAB_SIZE), busy_state()
    logits[:3] = 0
    values = {"temperature": (0, 0.8), "top_p": (neutral, 0.9), "repetition_penalty": (neutral, 1.2)}
    values |= {"position": (0, 9), "history_row": (REQUESTS, 3)}
    columns = {name: [padding] * 3 + [value] for name, (padding, value) in values.items()}
    padded = jit_sample(logits, make_inputs(4, seed=[0, 0, 0, 3], **columns), state)
    alone = make_inputs(1, seed=3, **{name: value for name, (_, value) in values.items()})
    assert padded.token[:3].tolist() == [0, 0, 0]
    assert padded.token[3] == jit_sample(logits[3:], alone, state).token[0]


def test_a_row_of_nans_yields_no_token_and_a_sound_neighbor() -> None:
    logits = random_logits(4, VOCAB_SIZE)
    logits[0] = np.nan
    logits[1, 4] = np.nan
    for temperature in (0.0, 1.0):
        asks = {"temperature": temperature, "top_p": 0.9, "top_k": 10, "min_p": 0.01}
        sampled = jit_sample(logits, make_inputs(4, top_logprobs=2, **asks), state_with_history())
        assert sampled.token[0] == -1
        assert sampled.token[1] != 4
        assert 0 <= sampled.token[1] < VOCAB_SIZE
        assert np.isnan(sampled.logprob).tolist() == [True, True, False, False]
        alone = jit_sample(logits[2:3], make_inputs(1, **asks), state_with_history())
        assert sampled.token[2] == alone.token[0]


def test_an_infinite_logit_wins() -> None:
    logits = random_logits(1, VOCAB_SIZE)
    logits[0, 6] = np.inf
    for temperature in (0.0, GREEDY_BELOW_TEMPERATURE, 1.0):
        inputs = make_inputs(temperature=temperature, top_p=0.9, min_p=0.1)
        assert jit_sample(logits, inputs, state_with_history()).token[0] == 6


# --- penalties, bias and greedy rows -----------------------------------------------------------------------------


def test_penalties_see_the_known_positions_only_and_generated_ones_start_after_the_prompt() -> None:
    logits = np.array([[2.0, -2.0, 1.0, 1.0, 1.0]], np.float32)
    state = state_with_history([0, 1, 2, 2, 3, 3])  # the prompt is [0, 1], the last two are not known yet
    known = {"prompt_len": 2, "position": 4}
    repetition = jit_process(logits, make_inputs(repetition_penalty=2.0, **known), state)
    np.testing.assert_array_equal(repetition[0], [1.0, -4.0, 0.5, 1.0, 1.0])
    generated = jit_process(logits, make_inputs(presence_penalty=0.25, frequency_penalty=1.0, **known), state)
    np.testing.assert_array_equal(generated[0], [2.0, -2.0, 1.0 - 2 * 1.0 - 0.25, 1.0, 1.0])


def test_history_ids_outside_the_vocabulary_change_nothing() -> None:
    logits = random_logits(4, VOCAB_SIZE)
    state = state_with_history([-1, VOCAB_SIZE, 2**31 - 1, -(2**31)], [-1, -VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE + 1])
    inputs = make_inputs(4, repetition_penalty=2.0, presence_penalty=1.0, position=4, history_row=[0, 1, 0, 1])
    assert same_bits(jit_process(logits, inputs, state), logits)


def test_a_bias_is_added_to_the_tokens_of_its_own_request() -> None:
    state = set_request(empty_sampler_state(REQUESTS, MAX_CONTEXT), 1, NO_TOKENS, [(4, 100.0), (0, -100.0)])
    logits = random_logits(4, VOCAB_SIZE)
    inputs = make_inputs(4, bias_count=[0, 2, 1, 2], history_row=[0, 1, 1, 2])
    expected = logits.copy()
    expected[1:3, 4] += 100
    expected[1, 0] -= 100
    np.testing.assert_array_equal(jit_process(logits, inputs, state), expected)
    assert jit_sample(logits, inputs, state).token.tolist()[1:3] == [4, 4]


def test_setting_a_bias_replaces_the_old_one_in_place_and_compiles_once() -> None:
    state = set_request(empty_sampler_state(REQUESTS, MAX_CONTEXT), 4, NO_TOKENS, [(1, 1.0), (2, 2.0), (3, 3.0)])
    pointers = [array.unsafe_buffer_pointer() for array in state]
    with CountTraces() as traces:
        state = set_request(state, 4, NO_TOKENS, [(2, -1.0)])
        state = set_request(state, 0, NO_TOKENS, [(token, 0.5) for token in range(MAX_LOGIT_BIAS)])
    assert traces.number == 0
    assert [array.unsafe_buffer_pointer() for array in state] == pointers
    processed = jit_process(np.zeros((1, 4), np.float32), make_inputs(bias_count=1, history_row=4), state)
    np.testing.assert_array_equal(processed[0], [0, 0, -1, 0])


def test_bias_and_penalties_come_before_temperature_and_filters() -> None:
    state = set_request(state_with_history([2]), 0, np.array([2], np.int32), [(1, 1.0)])
    logits = np.array([[0.0, 0.5, 4.0, 1.0]], np.float32)
    inputs = make_inputs(temperature=0.5, top_k=2, repetition_penalty=4.0, bias_count=1, position=1)
    # Penalized and biased: [0, 1.5, 1, 1]; the second place is shared.
    np.testing.assert_array_equal(jit_process(logits, inputs, state)[0], [-np.inf, 3.0, 2.0, 2.0])


def test_a_greedy_row_takes_the_most_likely_token_after_penalties_whatever_the_filters() -> None:
    logits = random_logits(4, VOCAB_SIZE)
    state = state_with_history(*(row.argsort()[-3:] for row in logits))
    filters = {"top_k": 4, "top_p": 0.1, "min_p": 0.9}
    inputs = make_inputs(4, repetition_penalty=100.0, position=3, history_row=np.arange(4), **filters)
    expected = [row.argsort()[-4] for row in logits]
    assert jit_sample(logits, inputs, state).token.tolist() == expected
    tiny = inputs._replace(temperature=np.full(4, GREEDY_BELOW_TEMPERATURE * 0.9, np.float32))
    assert jit_sample(logits, tiny, state).token.tolist() == expected


# --- log-probabilities and history -------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [3, VOCAB_SIZE])
def test_log_probabilities_are_of_the_raw_distribution(vocab_size) -> None:
    logits = random_logits(4, vocab_size)
    state = set_request(state_with_history([0, 1], [1, 2]), 1, np.array([1, 2], np.int32), [(0, 50.0)])
    asked = [2, 20, 1, 0]
    inputs = make_inputs(
        4, temperature=[0, 1, 2, 0], top_k=2, bias_count=[0, 1, 0, 0], position=2, history_row=1, top_logprobs=asked
    )
    sampled = jit_sample(logits, inputs, state)
    logprobs = np.log(softmax(logits))
    np.testing.assert_allclose(sampled.logprob, logprobs[np.arange(4), np.asarray(sampled.token)], atol=1e-5)
    for row, number in enumerate(min(one, vocab_size) for one in asked):
        best = np.argsort(-logits[row])[:number]
        np.testing.assert_array_equal(sampled.top_ids[row, :number], best)
        np.testing.assert_allclose(sampled.top_logprobs[row, :number], logprobs[row, best], atol=1e-5)
        assert (np.asarray(sampled.top_ids[row, number:]) == -1).all()
        assert np.isneginf(sampled.top_logprobs[row, number:]).all()


def test_recorded_tokens_land_at_their_positions_and_padding_lands_nowhere() -> None:
    state = empty_sampler_state(2, 4)
    rows = np.array([0, 1, -1, 2, 0, 0], np.int32)
    positions = np.array([3, 0, 0, 1, -1, 4], np.int32)
    state = jax.jit(record_tokens)(state, rows, positions, np.arange(11, 17, dtype=np.int32))
    np.testing.assert_array_equal(state.history, [[0, 0, 0, 11], [12, 0, 0, 0]])


# --- compilation -------------------------------------------------------------------------------------------------


class CountTraces:
    """Counts the functions that jax traces inside the block."""

    def __enter__(self) -> "CountTraces":
        self.number = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, *_: object, **__: object) -> None:
        self.number += event == "/jax/core/compile/jaxpr_trace_duration"


def test_one_trace_per_shape_whatever_the_rows_ask_for() -> None:
    parameters, state = everything(4), busy_state()
    jit_sample.clear_cache()
    before = sample_traces[(4, VOCAB_SIZE)]
    for asked in ({}, {"temperature": 0.5}, {"top_k": 3}, {"bias_count": 3}, {"top_logprobs": 4}, parameters):
        jit_sample(random_logits(4, VOCAB_SIZE), make_inputs(4, **asked), state)
    assert sample_traces[(4, VOCAB_SIZE)] - before == 1


def primitives_of(jaxpr: Any) -> set[str]:
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for value in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                names |= primitives_of(inner)
    return names


def test_nothing_sorts_the_vocabulary_or_calls_the_host() -> None:
    jaxpr = jax.make_jaxpr(sample)(random_logits(2, VOCAB_SIZE), make_inputs(2), busy_state())
    primitives = primitives_of(jaxpr.jaxpr)
    assert {"cond", "reduce_max", "random_bits"} <= primitives
    assert not [name for name in primitives if "sort" in name or "callback" in name]


def test_each_optional_part_sits_behind_its_own_condition() -> None:
    jaxpr = jax.make_jaxpr(sample)(random_logits(2, VOCAB_SIZE), make_inputs(2), busy_state()).jaxpr
    outside = {equation.primitive.name for equation in jaxpr.eqns}
    assert not outside & {"scatter", "scatter-add", "while", "scan", "random_bits", "top_k"}


def test_the_small_greedy_sampler_chooses_what_the_full_one_chooses() -> None:
    logits = np.array(random_logits(8, VOCAB_SIZE))
    logits[1, 5:40] = logits[1].max() + 1  # ties go to the lowest id
    logits[2], logits[3] = np.nan, -np.inf
    logits[4, :3] = np.nan, np.inf, np.inf
    logits[5] = np.where(np.arange(VOCAB_SIZE) == 7, 0.0, -0.0)
    logits[6] = -np.abs(logits[6])
    full = jit_sample(logits, make_inputs(8), state_with_history()).token
    np.testing.assert_array_equal(jax.jit(ReferenceProvider().argmax)(logits), full)
    largest = np.argmax(np.where(np.isnan(logits), -np.inf, logits), axis=1)
    np.testing.assert_array_equal(full, np.where(np.isin(np.arange(8), (2, 3)), -1, largest))


def test_a_step_without_logprobs_has_the_same_tokens() -> None:
    logits = random_logits(4, VOCAB_SIZE)
    asks = {"temperature": [0, 1, 0, 2], "seed": 3}
    asked, not_asked = (
        jit_sample(logits, make_inputs(4, logprobs=logprobs, **asks), state_with_history())
        for logprobs in (True, False)
    )
    np.testing.assert_array_equal(asked.token, not_asked.token)
