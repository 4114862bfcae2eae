"""What stands behind a model's last layer: the product of its final hidden states with the vocabulary.

It is no part of a step's network, since it is of rows and not of tokens, and since not every step wants the same of it:
logits to sample from, or the most likely tokens alone, which a provider finds without writing a logit.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from kv_kernels.provider import Affine, KernelProvider, Norm
from kv_kernels.tensor_parallel import TENSOR_AXES


@dataclass(frozen=True)
class OutputProducts:
    """The products of `provider`; `tensor_width` is above 1 inside a `TensorMesh.manual` region.

    Rows behind the first `used` [] i32 have results that nobody reads; None where all are used.
    """

    provider: KernelProvider
    tensor_width: int = 1
    used: jax.Array | None = None

    def logits(self, x: jax.Array, matrix: Affine, vocab_size: int, *, norm: Norm) -> jax.Array:
        """norm(x) [rows, hidden] times matrix [vocab, hidden] transposed -> [rows, vocab] f32, the same on every rank.

        Under tensor parallelism the matrix is a rank's part of the vocabulary, or all of it (a tied embedding): then a
        rank multiplies its own range of that, where the ranks divide the vocabulary.
        """
        width, layer = self.tensor_width, None
        if width > 1 and matrix.weight.out_features == vocab_size:
            if vocab_size % width:
                return self._product(x, matrix, None, norm)
            # Seen as a stack of ranges, of which the rank is the index, so that no range is copied out.
            matrix = jax.tree.map(lambda leaf: leaf.reshape(width, -1, *leaf.shape[1:]), matrix)
            norm = Norm(jnp.broadcast_to(norm.weight, (width, *norm.weight.shape)), norm.eps)
            layer = lax.axis_index(TENSOR_AXES)
        part = self._product(x, matrix, layer, norm)
        return part if width == 1 else lax.all_gather(part, TENSOR_AXES, axis=1, tiled=True)

    def most_likely(self, x: jax.Array, matrix: Affine, vocab_size: int, *, norm: Norm) -> jax.Array:
        """Where the largest of the logits of x [rows, hidden] is -> [rows] i32; see `KernelProvider.argmax`."""
        if self.tensor_width == 1:
            return self.provider.most_likely(x, matrix, norm=norm, used=self.used)
        return self.argmax(self.logits(x, matrix, vocab_size, norm=norm))

    def argmax(self, logits: jax.Array) -> jax.Array:
        """See `KernelProvider.argmax`."""
        return self.provider.argmax(logits)

    def _product(self, x: jax.Array, matrix: Affine, layer: jax.Array | None, norm: Norm) -> jax.Array:
        (product,) = self.provider.linear(x, (matrix,), layer, norm=norm, out_dtype=jnp.float32, used=self.used)
        return product
