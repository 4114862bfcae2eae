"""What a command does before it generates: prompts become token ids, and options become settings."""

from pathlib import Path

import pytest
from lora_files import write_adapter
from rich.console import Console
from serving_fakes import SPEC, fake_model

from kv_execution import EngineConfig, SamplingParams, SamplingParamsError
from kv_serving.session import (
    PromptOptionError,
    SamplingOptions,
    adapter_of_each,
    config_for_jobs,
    encode_prompts,
    make_job,
    start_engine,
)
from models import load_model


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


def test_an_adapter_is_of_all_prompts_or_each_has_its_own() -> None:
    assert adapter_of_each(["a", "b"], []) == [None, None]
    assert adapter_of_each(["a", "b"], ["x"]) == ["x", "x"]
    assert adapter_of_each(["a", "b"], ["x", "y"]) == ["x", "y"]
    with pytest.raises(PromptOptionError, match="2 adapters for 3 prompts: give --adapter once for all, or once for"):
        adapter_of_each(["a", "b", "c"], ["x", "y"])


def test_an_engine_for_jobs_has_their_adapters_loaded(golden: Path, tmp_path: Path) -> None:
    model = load_model(golden / "llama")
    directory = str(write_adapter(tmp_path, golden / "llama", ("q_proj",), rank=5))
    rank = model.read_adapter(directory).rank
    params = SamplingParams(max_tokens=2)
    jobs = [make_job(fake_model(), [1, 2, 3], params, (), adapter) for adapter in (directory, directory)]
    config = config_for_jobs(jobs, model.spec, 1 << 20, 4, adapter_ranks=[rank], compilation_cache=False)
    assert (config.max_adapters, config.max_adapter_rank) == (1, 5)
    engine = start_engine(model, config, Console(quiet=True), warm_up=False, jobs=jobs)
    assert engine.adapters.names == (directory,)


def config_of(lengths: list[int], pool_bytes: int = 1 << 20) -> EngineConfig:
    jobs = [make_job(fake_model(), [1] * length, SamplingParams(max_tokens=length), ()) for length in lengths]
    return config_for_jobs(jobs, SPEC, pool_bytes, 4, compilation_cache=False)


@pytest.mark.parametrize(("number", "rows"), [(1, 1), (2, 2), (3, 4), (5, 8), (32, 32), (33, 32)])
def test_the_engine_depends_on_the_number_of_jobs_in_coarse_steps(number: int, rows: int) -> None:
    config = config_of([1] * number, pool_bytes=1 << 22)
    assert config == config_of([5] * number, pool_bytes=1 << 22)
    assert (config.max_requests, config.max_step_tokens, config.max_context) == (rows, 256, None)
    assert (config.tokens_per_page, config.compilation_cache, config.prefix_cache) == (4, False, number > 1)


@pytest.mark.parametrize(
    ("lengths", "pool_bytes"), [([2], 1 << 16), ([90], 1 << 16), ([90] * 5, 1 << 18), ([90] * 20, 1 << 20)]
)
def test_the_pools_are_no_larger_than_the_jobs_call_for(lengths: list[int], pool_bytes: int) -> None:
    # A token takes 256 bytes, and no job has more than the model's 100 tokens.
    assert config_of(lengths).kv_pool_bytes == pool_bytes


def test_a_pool_that_is_asked_for_is_never_exceeded() -> None:
    for pool_bytes in (1 << 10, 1 << 14, 1 << 20):
        for length in (1, 20, 90):
            assert config_of([length], pool_bytes).kv_pool_bytes <= pool_bytes
