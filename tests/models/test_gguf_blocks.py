"""K-quants: values that the gguf package reads, bit for bit, whole and in slices; models whose layers mix them."""

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_files import random_k_blocks, write_gguf

from benchmarks.random_llama import write_random_llama
from kv_execution import EngineConfig, PagedEngine, SamplingParams
from kv_kernels.dequantize import dequantize
from kv_kernels.weights import BlockQuantWeight, MixedWeight, take_columns, take_rows
from models import load_model
from models.gguf_blocks import split_blocks

# In one program, since each operation alone would be compiled for itself.
jit_dequantize = jax.jit(dequantize, static_argnums=1)

KINDS = ["q4_k", "q5_k", "q6_k"]
BITS = {"q4_k": 4.625, "q5_k": 5.625, "q6_k": 6.5625}
"""A number's share of the weight in memory; in the file it is 4.5, 5.5 and 6.5625."""


def random_blocks(kind: str, rows: int = 5, columns: int = 768) -> np.ndarray:
    return random_k_blocks((rows, columns), gguf.GGMLQuantizationType[kind.upper()], seed=3)


@pytest.mark.usefixtures("fully_optimized")
@pytest.mark.parametrize("kind", KINDS)
def test_random_blocks_have_the_values_that_the_gguf_package_reads(kind: str) -> None:
    raw = random_blocks(kind)
    weight = split_blocks(raw, kind)
    assert (weight.out_features, weight.in_features, weight.nbytes) == (5, 768, 5 * 768 * BITS[kind] / 8)
    theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.upper()])
    ours = np.asarray(jit_dequantize(weight, jnp.float32))
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    some = take_rows(weight, np.array([4, 0]))
    np.testing.assert_array_equal(dequantize(some, jnp.float32), theirs[[4, 0]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [2, 3, 4, 8, 24])
def test_slices_of_columns_put_together_are_the_whole(kind: str, parts: int) -> None:
    weight = split_blocks(random_blocks(kind), kind)
    width = 768 // parts
    slices = [take_columns(weight, start, start + width) for start in range(0, 768, width)]
    whole = jax.tree.map(lambda *each: np.concatenate(each, axis=-1), *slices)
    np.testing.assert_array_equal(jit_dequantize(whole, jnp.float32), jit_dequantize(weight, jnp.float32))


@pytest.fixture(scope="module")
def mixed_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file as llama.cpp's Q4_K_M is: some layers' values and down projections have more bits than the others'."""
    directory = tmp_path_factory.mktemp("mixed")
    case = write_random_llama(
        directory / "case", layers=4, hidden=256, vocab_size=320, rope_parameters={"rope_theta": 10000.0}
    )

    def storage(name: str) -> str:
        if "ffn_down" in name or "attn_v" in name:
            return "Q6_K" if name.startswith(("blk.0", "blk.3")) else "Q4_K"
        return {"output.weight": "Q6_K", "token_embd.weight": "Q5_K"}.get(name, "Q4_K")

    return write_gguf(case, directory / "model.gguf", storage=storage, metadata={"general.alignment": 32})


def test_a_mixed_file_stays_quantized(mixed_gguf: Path) -> None:
    model = load_model(mixed_gguf)
    down = model.params["layers"]["mlp"]["down"]["weight"]
    assert isinstance(down, MixedWeight)
    assert [part.kind for part in down.parts] == ["q6_k", "q4_k"]
    assert (down.which.tolist(), down.at.tolist()) == ([0, 1, 1, 0], [0, 0, 1, 1])
    assert isinstance(model.params["layers"]["mlp"]["up"]["weight"], BlockQuantWeight)
    assert model.spec.parameter_bytes < 1.06 * mixed_gguf.stat().st_size


def test_native_and_reference_answer_alike_from_a_mixed_file_on_one_device_and_on_two(mixed_gguf: Path) -> None:
    answers = []
    for provider, width in (("reference", 1), ("native", 1), ("native", 2)):
        model = load_model(mixed_gguf, tensor_parallel=width)
        assert load_model(mixed_gguf).spread(width).fingerprint == model.fingerprint
        engine = PagedEngine(
            model, EngineConfig(kv_pool_bytes=1 << 20, max_requests=1, provider=provider, max_step_tokens=16)
        )
        engine.init_paged_runtime()
        answers.append(engine.generate([[5, 9, 77, 3]], SamplingParams(max_tokens=8))[0].tokens)
    assert answers[0] == answers[1] == answers[2]
