"""Writing a step's K and V into the pools: one program a token, both pools in place."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kv_kernels.pallas.softmax import divide
from kv_kernels.provider import PoolPair

# mypy: disable-error-code="no-untyped-def"
# Refs, the arguments of kernels, have no public type.


def append_rows(k_new: jax.Array, v_new: jax.Array, slots: jax.Array, pools: PoolPair, *, interpret: bool) -> PoolPair:
    """k_new and v_new [tokens, kv_heads, head_dim] at `slots` [tokens] i32; a slot outside the pools writes nothing."""
    num_pages, tokens_per_page, kv_heads, head_dim = pools.k.shape
    lanes = (pl.next_power_of_2(kv_heads), pl.next_power_of_2(head_dim))

    def jaxkv_append_kv(slots_ref, k_ref, v_ref, _k_pool, _v_pool, k_pool_ref, v_pool_ref):
        token = pl.program_id(0)
        slot = slots_ref[token]
        # A negative slot would wrap as an index.
        inside = (slot >= 0) & (slot < num_pages * tokens_per_page)
        slot = jnp.where(inside, slot, 0)
        page = divide(slot, tokens_per_page)
        head = lax.broadcasted_iota(jnp.int32, (lanes[0], 1), 0)
        dim = lax.broadcasted_iota(jnp.int32, (1, lanes[1]), 1)
        mask = (head < kv_heads) & (dim < head_dim)
        for new_ref, pool_ref in ((k_ref, k_pool_ref), (v_ref, v_pool_ref)):
            row = plgpu.load(new_ref.at[token, head, dim], mask=mask, other=0)
            where = pool_ref.at[page, slot - page * tokens_per_page, head, dim]
            plgpu.store(where, row.astype(pool_ref.dtype), mask=mask & inside)

    return PoolPair(
        *pl.pallas_call(
            jaxkv_append_kv,
            grid=(slots.shape[0],),
            out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
            input_output_aliases={3: 0, 4: 1},
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
        )(slots, k_new, v_new, *pools)
    )
