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


@pytest.mark.parametrize(("number", "rows"), [(1, 1), (2, 2), (3, 4), (5, 8), (32, 32), (40, 32)])
def test_the_engine_depends_on_nothing_of_the_jobs_but_their_number(number: int, rows: int) -> None:
    configs = [
        config_for_jobs(
            [make_job(fake_model(), [1] * length, SamplingParams(max_tokens=length), ())] * number,
            1 << 20,
            4,
            compilation_cache=False,
        )
        for length in (1, 50)
    ]
    assert configs[0] == configs[1]
    assert (configs[0].max_requests, configs[0].max_step_tokens, configs[0].max_context) == (rows, 256, None)
    assert (configs[0].kv_pool_bytes, configs[0].tokens_per_page, configs[0].compilation_cache) == (1 << 20, 4, False)
