"""The modules that hold a decoder's parameters: a table of embeddings, a norm, a matrix with its bias and adapters.

Each is built with abstract parameters (shapes only), says how tensor parallelism spreads them, and hands a step what it
takes; nothing is computed here.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kv_kernels.provider import Affine, LowRank, Norm
from kv_kernels.step_view import StepView
from kv_kernels.tensor_parallel import Split
from kv_kernels.weights import DenseWeight
from models.module import Module, Parameter


def _abstract(shape: tuple[int, ...]) -> Any:
    """A parameter's description, in the place of its array."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class Embedding(Module):
    """Token embedding [vocab, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        self.weight: Any = Parameter(DenseWeight(_abstract((vocab_size, hidden_size))))

    @property
    def matrix(self) -> Affine:
        """The embedding as the output product of a model that ties them."""
        return Affine(self.weight)

    def __call__(self, token_ids: jax.Array, step: StepView) -> jax.Array:
        return step.embed(token_ids, self.weight)


class RMSNorm(Module):
    """weight [*stack, features] f32; computed by the product that it precedes or follows."""

    def __init__(self, features: int, eps: float, stack: tuple[int, ...] = (), split: Split = "whole") -> None:
        self.weight: Any = Parameter(_abstract((*stack, features)), split)
        self.eps = eps
        self.split = split

    @property
    def norm(self) -> Norm:
        """What a product takes."""
        return Norm(self.weight, self.eps)


class Linear(Module):
    """x [tokens, in] -> [tokens, out]; weight [*stack, out, in], bias [*stack, out] f32 or None; the pair of matrices
    of the adapters where they have columns.

    `split`: how tensor parallelism spreads it. What is split by inputs goes to `StepView.add_linear`, which adds its
    bias once, so that every rank has all of that.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        split: Split,
        bias: bool = False,
        stack: tuple[int, ...] = (),
        adapter_columns: int = 0,
    ) -> None:
        self.weight: Any = Parameter(DenseWeight(_abstract((*stack, out_features, in_features))), split)
        bias_split: Split = "whole" if split == "inputs" else split
        self.bias: Any = Parameter(_abstract((*stack, out_features)), bias_split) if bias else None
        # The columns of adapters are whole on every rank: what is split is what the weight has split.
        shape_in, shape_out = (*stack, adapter_columns, in_features), (*stack, out_features, adapter_columns)
        split_in: Split = "inputs" if split == "inputs" else "whole"
        self.adapter_in: Any = Parameter(DenseWeight(_abstract(shape_in)), split_in) if adapter_columns else None
        self.adapter_out: Any = Parameter(DenseWeight(_abstract(shape_out)), bias_split) if adapter_columns else None

    @property
    def matrix(self) -> Affine:
        """What a product takes."""
        adapters = None
        if self.adapter_in is not None:
            adapters = LowRank(self.adapter_in, self.adapter_out)
        return Affine(self.weight, self.bias, adapters)
