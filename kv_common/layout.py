"""How K/V pages are laid out in memory, and how many bytes that takes.

Contract: an immutable description, valid once constructed, of the page pools of one model on one or many devices.
A *page* is one page number: `tokens_per_page` token slots of K and of V in every layer. Page 0 is the padding page:
padded tokens write there and nothing ever reads it, so it is never dealt and counts as memory but not as capacity.

K/V heads spread over `kv_head_shards` devices in one of three regimes. *whole*: one shard. *partitioned*: the shards
divide the heads. *replicated*: the heads divide the shards, each shard holds one head and `replication_factor` shards
hold the same one. Anything else is refused here, so nobody downstream needs a fourth case.
"""

from dataclasses import dataclass
from typing import Literal

from kv_common.errors import JaxkvError

PADDING_PAGE = 0
"""The page that padded tokens write to; never dealt to a request."""

# numpy has no bfloat16 or float8, and this package may not import ml_dtypes, so the sizes are written down.
ELEMENT_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}

MAX_SLOTS = 2**31 - 1
"""Token slots over all layers that int32 indices can address."""

ShardingRegime = Literal["whole", "partitioned", "replicated"]


class LayoutError(JaxkvError):
    """A K/V layout that cannot exist, or a byte budget that holds none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStorageLayoutV1:
    """The geometry of the page pools.

    Raises:
        LayoutError: a size below 1, fewer than 2 pages, an unknown dtype, shards and heads of which neither divides
            the other, or more token slots than int32 can number.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    tokens_per_page: int = 16
    dtype: str = "float32"
    kv_head_shards: int = 1

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "tokens_per_page", "kv_head_shards"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}: give at least 1")
        if self.num_pages < 2:
            raise LayoutError(f"num_pages is {self.num_pages}: give at least 2, page 0 is padding and holds no tokens")
        if self.dtype not in ELEMENT_BYTES:
            raise LayoutError(f"K/V dtype {self.dtype!r} is unknown: choose one of {', '.join(ELEMENT_BYTES)}")
        heads, shards = self.num_kv_heads, self.kv_head_shards
        if heads % shards and shards % heads:
            raise LayoutError(
                f"{heads} K/V heads cannot spread over {shards} shards: choose a divisor or a multiple of {heads}"
            )
        slots = self.num_layers * self.num_pages * self.tokens_per_page
        if slots > MAX_SLOTS:
            raise LayoutError(
                f"{self.num_layers} layers x {self.num_pages} pages x {self.tokens_per_page} tokens is {slots} slots, "
                f"more than int32 can number ({MAX_SLOTS}): give fewer pages"
            )

    @property
    def regime(self) -> ShardingRegime:
        """How K/V heads meet shards: `whole`, `partitioned` or `replicated`."""
        if self.kv_head_shards == 1:
            return "whole"
        return "partitioned" if self.num_kv_heads % self.kv_head_shards == 0 else "replicated"

    @property
    def heads_per_shard(self) -> int:
        """K/V heads that one shard stores."""
        return max(1, self.num_kv_heads // self.kv_head_shards)

    @property
    def replication_factor(self) -> int:
        """Shards that store the same head; 1 unless replicated."""
        return max(1, self.kv_head_shards // self.num_kv_heads)

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored number."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def usable_pages(self) -> int:
        """Pages that can hold tokens: all but the padding page."""
        return self.num_pages - 1

    @property
    def usable_tokens(self) -> int:
        """Tokens that the usable pages hold together."""
        return self.usable_pages * self.tokens_per_page

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page number occupies on one shard: K and V, every layer, the shard's own heads."""
        return 2 * self.num_layers * self.tokens_per_page * self.heads_per_shard * self.head_dim * self.element_bytes

    @property
    def pool_bytes_per_shard(self) -> int:
        """Bytes of the K and V pools on one shard, padding page included."""
        return self.num_pages * self.bytes_per_page

    @property
    def total_pool_bytes(self) -> int:
        """Bytes of the pools over all shards, replicas counted as often as they are stored."""
        return self.kv_head_shards * self.pool_bytes_per_shard

    @property
    def pool_shape_per_shard(self) -> tuple[int, int, int, int]:
        """Shape of the K pool (and of the V pool) on one shard: page p of layer l is row l * num_pages + p."""
        return (self.num_layers * self.num_pages, self.tokens_per_page, self.heads_per_shard, self.head_dim)

    @property
    def page_geometry(self) -> tuple[tuple[str, int], ...]:
        """What a page's bytes depend on besides dtype and sharding; the number of pages is not part of it."""
        names = ("num_layers", "num_kv_heads", "head_dim", "tokens_per_page")
        return tuple((name, getattr(self, name)) for name in names)

    def pages_for(self, tokens: int) -> int:
        """Pages that a sequence of `tokens` tokens occupies (0 for none). Raises LayoutError below 0."""
        if tokens < 0:
            raise LayoutError(f"cannot hold {tokens} tokens: give 0 or more")
        return -(-tokens // self.tokens_per_page)


def layout_for_budget(
    *,
    pool_bytes: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    tokens_per_page: int = 16,
    dtype: str = "float32",
    kv_head_shards: int = 1,
) -> KvStorageLayoutV1:
    """The layout with the most pages whose pools fit `pool_bytes` on each shard, padding page included.

    Raises:
        LayoutError: the budget holds fewer than 2 pages, or whatever `KvStorageLayoutV1` refuses.
    """
    smallest = KvStorageLayoutV1(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_pages=2,
        tokens_per_page=tokens_per_page,
        dtype=dtype,
        kv_head_shards=kv_head_shards,
    )
    if pool_bytes < smallest.pool_bytes_per_shard:
        raise LayoutError(
            f"a K/V pool of {pool_bytes} bytes is too small for 2 pages of {smallest.bytes_per_page} bytes: "
            f"give at least {smallest.pool_bytes_per_shard} bytes, or fewer than {tokens_per_page} tokens per page"
        )
    return KvStorageLayoutV1(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_pages=pool_bytes // smallest.bytes_per_page,
        tokens_per_page=tokens_per_page,
        dtype=dtype,
        kv_head_shards=kv_head_shards,
    )
