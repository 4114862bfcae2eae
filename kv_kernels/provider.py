"""What a kernel provider is: the only vocabulary that the rest of jaxkv shares with a kernel library.

Pools are NHD and flat over layers: `[num_layers * num_pages, tokens_per_page, kv_heads, head_dim]`, K and V apart, so
that page p of layer l is row `l * num_pages + p` and a layer loop can carry the pools without copying them. A
provider turns the neutral page table of a step into arrays of its own (`plan`, on the host) and runs the operations
on the device. What it cannot do it says before the engine starts (`unsupported`), never by a wrong answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np

from kv_common.page_table import KvPageTableV1
from kv_kernels.weights import LayerIndex, StoredWeight, Weight


@dataclass(frozen=True)
class KernelNeeds:
    """What a model and its cache ask of a provider; `window` and `soft_cap` are None where no layer has one.

    With `int8_activations` activations are to be rounded to 8 bits where weights that are small integers meet them.
    """

    platform: str
    kv_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tokens_per_page: int
    window: int | None = None
    soft_cap: float | None = None
    int8_activations: bool = False


class PlanShape(NamedTuple):
    """The static sizes that a step's arrays are padded to."""

    tokens: int
    rows: int
    page_entries: int


class PoolPair(NamedTuple):
    """The K and V pools, each [num_layers * num_pages, tokens_per_page, kv_heads, head_dim]."""

    k: jax.Array
    v: jax.Array


class LowRank(NamedTuple):
    """The adapters of a weight [*stack, out, in]: into [*stack, columns, in], out [*stack, out, columns]."""

    into: Weight
    out: Weight


class Affine(NamedTuple):
    """A weight [*stack, out, in], and what is added to its products: bias [*stack, out] f32 or None.

    `adapters` are the step's business: `StepView` adds their products, and a provider is never given any.
    """

    weight: Weight
    bias: jax.Array | None = None
    adapters: LowRank | None = None


class Norm(NamedTuple):
    """RMSNorm (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + eps) * weight, in float32. weight [*stack, in] f32."""

    weight: jax.Array
    eps: float


class Rotation(NamedTuple):
    """cos, sin [tokens, pairs] f32: element i of a head turns with element i + pairs (Su et al., 2021); the rest of
    the head stays.
    """

    cos: jax.Array
    sin: jax.Array


Activation = Literal["silu", "gelu_tanh", "relu2"]
"""relu2 stands alone: no pass is gated by it."""


class Placement(NamedTuple):
    """Where a step's K/V goes, int32, in pages and slots of layer 0.

    slots [tokens]; scrub_pages [entries], to be cleared before the append, -1 for none; copy_sources and copy_targets
    [rows], pages to copy after that and before the append, target -1 for none.
    """

    slots: jax.Array
    scrub_pages: jax.Array
    copy_sources: jax.Array
    copy_targets: jax.Array


class Scoring(NamedTuple):
    """How queries weigh keys. `scale` has no default: a provider's own default on a query that is already scaled is a
    wrong answer that no comparison between shardings can see. `window` counts the keys that a query sees.
    """

    scale: np.float32
    window: int | None = None
    soft_cap: float | None = None


class Tiles(NamedTuple):
    """Pairs of a token and one of its k choices, grouped by the choice; token t's are t * k to t * k + k - 1.

    entry [tiles] i32: what a tile's pairs have chosen, of a stack; pair [tiles, width] i32: tokens * k for none;
    used [] i32: tiles from there on are padding, and have no pairs, but an entry that there is.
    """

    entry: jax.Array
    pair: jax.Array
    used: jax.Array


class CacheAttended(NamedTuple):
    """values [tokens, heads, head_dim] and the pools after the append."""

    values: jax.Array
    pools: PoolPair


class KernelProvider(Protocol):
    """The operations of a provider; instances are hashable, since a compiled step is specific to one.

    `append_kv`, `paged_attention`, `product` and `embed` are what a kernel library has. `linear`, `grouped_mlp` and
    `attend` are what a step calls: whole passes over them, which `ComposedKernels` writes in jax.numpy and a provider
    may fuse.
    """

    @property
    def name(self) -> str:
        """The name by which a configuration asks for this provider."""

    def unsupported(self, needs: KernelNeeds) -> str | None:
        """Why this provider cannot serve `needs`, with the numbers, or None where it can."""

    def plan(self, table: KvPageTableV1, shape: PlanShape) -> Any:
        """A pytree of numpy arrays, padded to `shape`, that `paged_attention` takes for this step."""

    def later(self, plan: Any, steps: jax.Array | int) -> Any | None:
        """`plan`, of a step of one token a row, as it is after so many more of them, whose pages it has already; None
        where a plan holds for its own step alone.
        """

    def append_kv(self, k_new: jax.Array, v_new: jax.Array, slots: jax.Array, pools: PoolPair) -> PoolPair:
        """Write k_new and v_new [tokens, kv_heads, head_dim] at absolute `slots` [tokens] i32 of the pools, in place
        under donation.
        """

    def paged_attention(
        self, q: jax.Array, pools: PoolPair, plan: Any, *, first_page: jax.Array | int, scoring: Scoring
    ) -> jax.Array:
        """Attend q [tokens, heads, head_dim] over the pages of the plan, ragged and bottom-right causal -> the same
        shape. `first_page` is the pool row of the layer's page 0.
        """

    def product(
        self, x: jax.Array, weight: Weight, layer: LayerIndex | None, out_dtype: jax.typing.DTypeLike | None
    ) -> jax.Array:
        """x [tokens, in] times weight [out, in] transposed -> [tokens, out], accumulated in float32; `layer` picks
        from a stack.
        """

    def embed(self, token_ids: jax.Array, weight: StoredWeight) -> jax.Array:
        """Rows `token_ids` [tokens] of weight [vocab, hidden] -> [tokens, hidden] f32."""

    def zeros(self, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
        """A pool of zeros, in the memory that the kernels read best."""

    def argmax(self, scores: jax.Array) -> jax.Array:
        """Where the largest of each row of scores [rows, vocab] f32 is -> [rows] i32: the first of equals, and -1 where
        none is above -inf; nan counts as -inf, and infinity as the largest float.
        """

    def most_likely(self, x: jax.Array, matrix: Affine, *, norm: Norm, used: jax.Array | None = None) -> jax.Array:
        """`argmax` of the float32 results of `linear` for x [rows, in], to the bit -> [rows] i32; of a matrix without a
        stack. `used` as there.
        """

    def normalize(self, x: jax.Array, norm: Norm, layer: LayerIndex | None) -> jax.Array:
        """RMSNorm over the last axis of x [..., features], in float32 -> the same shape and dtype."""

    def linear(
        self,
        x: jax.Array,
        matrices: Sequence[Affine],
        layer: LayerIndex | None,
        *,
        norm: Norm | None = None,
        residual: jax.Array | None = None,
        activation: Activation | None = None,
        out_dtype: jax.typing.DTypeLike | None = None,
        used: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """norm(x) [tokens, in] times every matrix, bias added -> [tokens, out] for each.

        With an activation there are two matrices and one result, activation(first) * second; `residual` [tokens, out]
        is added to a single result. Where `used` [] i32 is given only so many tokens, the first, have results that
        matter; a provider need not compute the others'.
        """

    def grouped_mlp(
        self,
        x: jax.Array,
        gate: Weight,
        up: Weight,
        down: Weight,
        tiles: Tiles,
        k: int,
        *,
        activation: Activation,
    ) -> jax.Array:
        """Of every pair p the gated MLP of x [tokens, in] at p // k, by the entry of its tile in the stacks gate, up
        [entries, inner, in] and down [entries, out, inner] -> [tokens * k, out] f32, 0 for a pair in no tile.

        Only entries that a tile has are read, and a pair's result depends on no other pair and on no tile's width.
        """

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pools: PoolPair,
        placement: Placement,
        plan: Any,
        *,
        layer: LayerIndex,
        num_pages: int,
        scoring: Scoring,
        rotation: Rotation | None = None,
    ) -> CacheAttended:
        """A layer's step in the cache: pages cleared and copied, k rotated, k and v [tokens, kv_heads, head_dim]
        appended, q [tokens, heads, head_dim] rotated and attended.
        """
