"""What a command does before it generates: prompts become token ids, and options become settings."""

import pytest
from serving_fakes import fake_model

from kv_execution import SamplingParams, SamplingParamsError
from kv_serving.session import PromptOptionError, SamplingOptions, config_for_jobs, encode_prompts, make_job


def texts(ids: list[list[int]]) -> list[str]:
    return ["".join(map(chr, each)) for each in ids]


def test_a_prompt_is_a_chat_where_the_model_has_a_template() -> None:
    assert texts(encode_prompts(fake_model(), ["hi"], None, None)) == ["user: hi"]
    assert texts(encode_prompts(fake_model(), ["hi"], None, "be kind")) == ["system: be kind\nuser: hi"]
    assert texts(encode_prompts(fake_model(template=False), ["hi"], None, None)) == ["hi"]
    assert texts(encode_prompts(fake_model(), ["hi"], False, None)) == ["hi"]


@pytest.mark.parametrize(
    ("model", "prompts", "chat", "system", "message"),
    [
        (fake_model(), ["hi", ""], None, None, "the prompt is empty"),
        (fake_model(), ["hi"], False, "be kind", "a raw prompt has no system message"),
        (fake_model(template=False), ["hi"], True, None, "parrot has no chat template"),
        (fake_model(tokenizer=False), ["hi"], None, None, "parrot came without a tokenizer"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(
    model: object, prompts: list[str], chat: bool | None, system: str | None, message: str
) -> None:
    with pytest.raises(PromptOptionError, match=message):
        encode_prompts(model, prompts, chat, system)


def test_what_the_user_leaves_out_is_the_models_default() -> None:
    defaults = fake_model().generation
    assert SamplingOptions(max_tokens=7).resolve(defaults) == SamplingParams(max_tokens=7, temperature=0.5)
    assert SamplingOptions(max_tokens=7, temperature=0.0, seed=3).resolve(defaults).temperature == 0.0


def test_a_number_out_of_range_is_the_samplers_own_error() -> None:
    with pytest.raises(SamplingParamsError, match="top_p"):
        SamplingOptions(max_tokens=7, top_p=1.5).resolve(fake_model().generation)


def test_the_engine_is_no_larger_than_the_jobs() -> None:
    jobs = [make_job(fake_model(), [1] * length, SamplingParams(max_tokens=10), ()) for length in (5, 20)]
    config = config_for_jobs(jobs, max_context=100, kv_pool_bytes=1 << 20, tokens_per_page=4)
    assert (config.max_requests, config.max_step_tokens, config.max_context) == (2, 25, 30)
    assert (config.kv_pool_bytes, config.tokens_per_page) == (1 << 20, 4)


def test_the_engine_is_no_larger_than_the_model_and_the_batch_limits() -> None:
    jobs = [make_job(fake_model(), [1] * 50, SamplingParams(max_tokens=60), ())] * 40
    config = config_for_jobs(jobs, max_context=100, kv_pool_bytes=1 << 20, tokens_per_page=4)
    assert (config.max_requests, config.max_step_tokens, config.max_context) == (32, 256, 100)
