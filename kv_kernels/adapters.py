"""Low-rank adapters (LoRA, Hu et al., 2021), several in one batch: what a product with an adapted weight adds.

All adapters' ranks stand side by side as one pair of matrices for each weight, a range of columns for each slot. A
token multiplies by the whole pair with the columns of other slots set to zero between the two, so nothing is gathered,
shapes are fixed when the engine is made, and a token's sum has the same terms whoever else is in the batch. Ranges of
an empty slot, and ranks that an adapter does not use, are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kv_kernels.provider import Affine, KernelProvider, LowRank, Norm
from kv_kernels.weights import LayerIndex

NO_ADAPTER = -1
"""The slot of a request without an adapter."""


class AdapterCapacity(NamedTuple):
    """How many adapters there can be at once, and the largest rank of one."""

    slots: int
    rank: int

    @property
    def columns(self) -> int:
        """Ranks of all slots."""
        return self.slots * self.rank


def column_mask(token_slots: jax.Array, capacity: AdapterCapacity) -> jax.Array:
    """The columns [tokens, columns] bool that belong to each token's slot [tokens] i32; none for NO_ADAPTER."""
    return jnp.arange(capacity.columns) // capacity.rank == token_slots[:, None]


def adapter_products(
    provider: KernelProvider,
    x: jax.Array,
    adapters: Sequence[LowRank],
    layer: LayerIndex | None,
    mask: jax.Array,
    norm: Norm | None = None,
) -> list[jax.Array]:
    """norm(x) [tokens, in] through the adapters of its tokens -> [tokens, out] f32 for each of `adapters`; `mask` as of
    `column_mask`. In the provider's own passes, so that its promises about a token's bits hold here too.
    """
    intos = [Affine(each.into) for each in adapters]
    inner = provider.linear(x, intos, layer, norm=norm, out_dtype=jnp.float32)
    # Back in x's dtype, in which a provider would otherwise widen the matrix.
    masked = [jnp.where(mask, each, 0).astype(x.dtype) for each in inner]
    return [provider.product(each, pair.out, layer, jnp.float32) for each, pair in zip(masked, adapters, strict=True)]
