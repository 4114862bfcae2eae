"""Weights of 16 bits stay so under float32 activations, and give what the same numbers in 32 bits give."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from engine_case import GOLDEN, golden_prompts, make_engine
from lora_files import write_adapter
from safetensors.numpy import load_file, save_file

from kv_execution import SamplingParams
from kv_kernels.weights import DenseWeight
from models import LoadedModel, load_model
from models.assembly import by_path

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def write_rounded(case: str, to: Path, numbers: jnp.dtype, storage: jnp.dtype) -> Path:
    """The golden model with its weights rounded to `numbers`, stored as `storage`."""
    to.mkdir()
    (to / "config.json").write_bytes((GOLDEN / case / "config.json").read_bytes())
    tensors = load_file(GOLDEN / case / "model.safetensors")
    save_file(
        {name: tensor.astype(numbers).astype(storage) for name, tensor in tensors.items()}, to / "model.safetensors"
    )
    return to


@pytest.fixture
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[LoadedModel, LoadedModel]:
    """The same model stored in 16 bits and in 32."""
    case, dtype, ranks = request.param
    narrow = write_rounded(case, tmp_path / "narrow", jnp.dtype(dtype), jnp.dtype(dtype))
    wide = write_rounded(case, tmp_path / "wide", jnp.dtype(dtype), jnp.dtype("float32"))
    return load_model(narrow, tensor_parallel=ranks), load_model(wide, tensor_parallel=ranks)


def matrices_of(model: LoadedModel) -> dict[str, DenseWeight]:
    return {path: leaf for path, leaf in by_path(model.params).items() if isinstance(leaf, DenseWeight)}


@pytest.mark.parametrize(
    ("both", "provider"),
    [
        (("llama", "bfloat16", 1), "native"),
        (("llama", "float16", 1), "native"),
        (("llama", "bfloat16", 1), "reference"),
        (("mixtral", "bfloat16", 1), "native"),
        (("qwen2", "bfloat16", 2), "native"),
        *(
            pytest.param((case, "bfloat16", ranks), provider, marks=pytest.mark.slow)
            for case, ranks, provider in (
                ("mixtral", 1, "pallas"),
                ("gemma2", 1, "native"),
                ("gemma3", 1, "native"),
                ("phi3", 1, "native"),
                ("olmo2", 1, "reference"),
                ("granite", 1, "native"),
                ("smollm3", 1, "reference"),
                ("qwen3_moe", 2, "native"),
                ("mixtral", 2, "reference"),
            )
        ),
    ],
    indirect=["both"],
)
def test_the_same_numbers_give_the_same_logits(both, provider, request):
    case, dtype, _ = request.node.callspec.params["both"]
    narrow, wide = both
    for path, weight in matrices_of(narrow).items():
        assert weight.values.dtype == dtype, path
        assert 2 * weight.nbytes == matrices_of(wide)[path].nbytes
    engines = [make_engine(model, provider=provider, max_step_tokens=16, max_requests=2) for model in both]
    prompts = [prompt[:40] for prompt in golden_prompts(case)[1:3]]
    ours, theirs = (engine.generate(prompts, GREEDY) for engine in engines)
    assert [result.tokens for result in ours] == [result.tokens for result in theirs]
    ours, theirs = (engine.score(prompts[1]) for engine in engines)
    assert np.abs(ours - theirs).max() < 1e-4


@pytest.mark.parametrize("both", [("llama", "bfloat16", 1)], indirect=True)
def test_an_adapter_is_added_in_float32(both, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", GOLDEN / "llama", ("q_proj", "down_proj"))
    prompt, scores = golden_prompts("llama")[1], []
    for model in both:
        engine = make_engine(model, max_requests=1, max_step_tokens=16, max_adapters=1, max_adapter_rank=8)
        engine.adapters.load("it", adapter)
        scores.append(engine.score(prompt, adapter="it"))
    assert np.abs(scores[0] - scores[1]).max() < 1e-4
    assert np.abs(scores[0] - make_engine(both[0], max_requests=1, max_step_tokens=16).score(prompt)).max() > 1e-2
