"""The K/V page pools on the device, and the poisoning of freed pages in debug mode.

Two arrays, flat over layers, made under jit so that they are never built on the host. Whoever calls a function
that donates them rebinds them in the same statement; nobody keeps a second reference.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from kv_common.errors import JaxkvError
from kv_common.layout import KvStorageLayoutV1
from kv_kernels.provider import KernelProvider, PoolPair
from kv_kernels.tensor_parallel import POOL_SPEC, TensorMesh

POISON_BATCH = 64
"""Pages poisoned by one call, so that one compiled program serves any number of them."""


class PoolAllocationError(JaxkvError):
    """The device cannot hold the pools."""


def allocate_pools(layout: KvStorageLayoutV1, provider: KernelProvider, mesh: TensorMesh | None = None) -> PoolPair:
    """Zeroed pools of `layout.pool_shape_per_shard`; over a mesh, every device makes its own.

    Raises PoolAllocationError where a device has no room.
    """
    shape, dtype = layout.pool_shape_per_shard, jnp.dtype(layout.dtype)
    here = layout.total_pool_bytes // (1 if mesh is None else mesh.num_processes)
    # A CPU hands out memory that it does not have, and ends the process when it is used.
    if jax.default_backend() == "cpu" and here > (present := _physical_memory_bytes()):
        raise PoolAllocationError(
            f"K/V pools of {here} bytes do not fit this machine's {present} bytes of memory; lower kv_pool_bytes"
        )

    def one() -> jax.Array:
        return provider.zeros(shape, dtype)

    if mesh is None:
        make = jax.jit(one)
    else:
        by_rank = mesh.manual(one, in_specs=(), out_specs=POOL_SPEC)
        make = jax.jit(by_rank, out_shardings=mesh.sharding(POOL_SPEC))
    try:
        return jax.block_until_ready(PoolPair(make(), make()))
    except jax.errors.JaxRuntimeError as error:
        raise PoolAllocationError(
            f"the device has no room for K/V pools of {layout.total_pool_bytes} bytes; lower kv_pool_bytes"
        ) from error


def _physical_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def poison_pages(pools: PoolPair, pages: NDArray[np.int32], layout: KvStorageLayoutV1) -> PoolPair:
    """Fill `pages` [n] with NaN in every layer, so that a read of a freed page shows in the output."""
    for start in range(0, len(pages), POISON_BATCH):
        batch = np.full(POISON_BATCH, -1, np.int32)
        chunk = pages[start : start + POISON_BATCH]
        batch[: len(chunk)] = chunk
        pools = _poison(pools, batch, layout.num_layers, layout.num_pages)
    return pools


@functools.partial(jax.jit, static_argnums=(2, 3), donate_argnums=0)
def _poison(pools: PoolPair, pages: jax.Array, num_layers: int, num_pages: int) -> PoolPair:
    rows = jnp.arange(num_layers)[:, None] * num_pages + pages
    rows = jnp.where(pages < 0, num_layers * num_pages, rows).reshape(-1)
    return PoolPair(*(pool.at[rows].set(jnp.nan, mode="drop") for pool in pools))
