"""The Triton append, interpreted: what it writes, what it leaves, and how it multiplies beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv_kernels.pallas import PallasProvider
from kv_kernels.provider import KernelNeeds, PoolPair
from kv_kernels.reference import ReferenceProvider
from kv_kernels.weights import DenseWeight

PALLAS = PallasProvider(interpret=True)


@pytest.mark.parametrize(("dtype", "pool_dtype"), [("float32", "float32"), ("float32", "bfloat16"), ("float16",) * 2])
def test_append_writes_its_slots_and_nothing_else(dtype, pool_dtype):
    # 3 heads of 5, so that both are padded in the kernel; slots 1, 2 and 4 are outside.
    pools = PoolPair(*(jnp.full((6, 4, 3, 5), 7, pool_dtype) for _ in range(2)))
    new = jnp.asarray(np.random.default_rng(0).standard_normal((5, 3, 5)), dtype)
    slots = jnp.asarray([9, -1, 24, 22, np.iinfo(np.int32).min], jnp.int32)
    after = jax.jit(PALLAS.append_kv)(new, -new, slots, pools)
    expected = jnp.full((24, 3, 5), 7, pool_dtype)
    for pool, rows in zip(after, (new, -new), strict=True):
        wanted = expected.at[jnp.asarray([9, 22])].set(rows[jnp.asarray([0, 3])].astype(pool_dtype))
        np.testing.assert_array_equal(pool.reshape(24, 3, 5), wanted)


def test_products_are_the_references_and_float32_is_not_cut_to_tf32():
    x, weight = jnp.ones((3, 8)), DenseWeight(jnp.arange(32.0).reshape(4, 8))
    np.testing.assert_array_equal(
        PALLAS.product(x, weight, None, None), ReferenceProvider().product(x, weight, None, None)
    )
    np.testing.assert_array_equal(PALLAS.embed(jnp.asarray([2, 0]), weight), weight.values[jnp.asarray([2, 0])])
    lowered = jax.jit(lambda x: PallasProvider().product(x, weight, None, None)).trace(x)
    assert "precision = [HIGHEST, HIGHEST]" in lowered.lower(lowering_platforms=("cuda",)).as_text()


def needs(**changes) -> KernelNeeds:
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "tokens_per_page": 16}
    return KernelNeeds(**({"platform": "cuda", "kv_dtype": "bfloat16"} | sizes | changes))


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_it_serves_gpus(platform):
    assert PallasProvider().unsupported(needs(platform=platform, window=4096, soft_cap=50.0)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "tpu"}, "not on tpu"),
        ({"platform": "cpu"}, "interpreted on cpu, not on cpu"),
        ({"kv_dtype": "int8"}, "int8 is not one of"),
        ({"num_kv_heads": 5}, "32 heads are not a multiple of 5"),
        ({"num_heads": 71, "num_kv_heads": 1}, "71 heads share a K/V head, more than 64"),
        ({"head_dim": 512}, "head_dim 512 is above 256"),
    ],
)
def test_what_it_lacks_is_named_with_the_numbers(changes, reason):
    assert reason in PallasProvider().unsupported(needs(**changes))
