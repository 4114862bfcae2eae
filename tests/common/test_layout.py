"""KvStorageLayoutV1: the three sharding regimes, and that every way of counting bytes agrees."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_common import PADDING_PAGE, KvStorageLayoutV1, LayoutError, layout_for_budget
from kv_common.layout import ELEMENT_BYTES, MAX_SLOTS

SMOLLM2 = KvStorageLayoutV1(num_layers=30, num_kv_heads=3, head_dim=64, num_pages=100)


@st.composite
def layouts(draw: st.DrawFn) -> KvStorageLayoutV1:
    shards = draw(st.integers(1, 16))
    factor = draw(st.integers(1, 8))
    heads = draw(st.sampled_from([shards * factor, *(n for n in range(1, shards + 1) if shards % n == 0)]))
    return KvStorageLayoutV1(
        num_layers=draw(st.integers(1, 100)),
        num_kv_heads=heads,
        head_dim=draw(st.integers(1, 256)),
        num_pages=draw(st.integers(2, 5000)),
        tokens_per_page=draw(st.integers(1, 256)),
        dtype=draw(st.sampled_from(sorted(ELEMENT_BYTES))),
        kv_head_shards=shards,
    )


def sharded(heads: int, shards: int) -> KvStorageLayoutV1:
    return KvStorageLayoutV1(num_layers=2, num_kv_heads=heads, head_dim=8, num_pages=4, kv_head_shards=shards)


@pytest.mark.parametrize(
    ("heads", "shards", "regime", "heads_per_shard", "replication_factor"),
    [
        (3, 1, "whole", 3, 1),
        (1, 1, "whole", 1, 1),
        (8, 4, "partitioned", 2, 1),
        (8, 8, "partitioned", 1, 1),
        (2, 8, "replicated", 1, 4),
        (1, 8, "replicated", 1, 8),
    ],
)
def test_heads_meet_shards_in_three_regimes(
    heads: int, shards: int, regime: str, heads_per_shard: int, replication_factor: int
) -> None:
    layout = sharded(heads, shards)
    assert layout.regime == regime
    assert layout.heads_per_shard == heads_per_shard
    assert layout.replication_factor == replication_factor


@pytest.mark.parametrize(("heads", "shards"), [(3, 2), (8, 3), (6, 4), (4, 6)])
def test_neither_dividing_the_other_is_refused_with_the_numbers(heads: int, shards: int) -> None:
    with pytest.raises(LayoutError, match=f"{heads} K/V heads cannot spread over {shards} shards"):
        sharded(heads, shards)


@given(layouts())
def test_counting_bytes_by_shard_and_by_head_agrees(layout: KvStorageLayoutV1) -> None:
    stored_heads = layout.num_kv_heads * layout.replication_factor
    slots = layout.num_layers * layout.num_pages * layout.tokens_per_page
    assert layout.total_pool_bytes == 2 * slots * stored_heads * layout.head_dim * layout.element_bytes
    assert layout.heads_per_shard * layout.kv_head_shards == stored_heads


@given(layouts())
def test_the_pool_shape_occupies_the_bytes_that_the_layout_states(layout: KvStorageLayoutV1) -> None:
    assert layout.pool_bytes_per_shard == 2 * math.prod(layout.pool_shape_per_shard) * layout.element_bytes


@given(layouts())
def test_a_budget_of_exactly_the_pools_gives_the_same_layout_back(layout: KvStorageLayoutV1) -> None:
    sizes = {name: value for name, value in dataclasses.asdict(layout).items() if name != "num_pages"}
    assert layout_for_budget(pool_bytes=layout.pool_bytes_per_shard, **sizes) == layout
    nearly_one_more = layout.pool_bytes_per_shard + layout.bytes_per_page - 1
    assert layout_for_budget(pool_bytes=nearly_one_more, **sizes) == layout


@given(layouts(), st.integers(0, 10**6))
def test_pages_for_is_the_fewest_pages_that_hold_the_tokens(layout: KvStorageLayoutV1, tokens: int) -> None:
    pages = layout.pages_for(tokens)
    assert (pages - 1) * layout.tokens_per_page < tokens <= pages * layout.tokens_per_page or tokens == pages == 0


def test_a_page_counts_keys_and_values_of_all_layers() -> None:
    assert SMOLLM2.bytes_per_page == 2 * 30 * 16 * 3 * 64 * 4
    assert SMOLLM2.pool_bytes_per_shard == SMOLLM2.total_pool_bytes == 100 * SMOLLM2.bytes_per_page


def test_the_padding_page_is_memory_but_not_capacity() -> None:
    assert PADDING_PAGE == 0
    assert SMOLLM2.usable_pages == 99
    assert SMOLLM2.usable_tokens == 99 * 16


def test_page_geometry_does_not_depend_on_how_many_pages_there_are() -> None:
    assert SMOLLM2.page_geometry == dataclasses.replace(SMOLLM2, num_pages=7).page_geometry
    assert SMOLLM2.page_geometry != dataclasses.replace(SMOLLM2, tokens_per_page=8).page_geometry


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"tokens_per_page": 0}, "tokens_per_page is 0"),
        ({"kv_head_shards": 0}, "kv_head_shards is 0"),
        ({"num_pages": 1}, "num_pages is 1: give at least 2"),
        ({"dtype": "float64"}, "'float64' is unknown: choose one of float32"),
        ({"num_pages": MAX_SLOTS}, "more than int32 can number"),
    ],
)
def test_an_impossible_layout_is_refused_with_the_number(change: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        dataclasses.replace(SMOLLM2, **change)


def test_a_budget_below_two_pages_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(LayoutError, match=f"give at least {2 * SMOLLM2.bytes_per_page} bytes"):
        layout_for_budget(pool_bytes=2 * SMOLLM2.bytes_per_page - 1, num_layers=30, num_kv_heads=3, head_dim=64)


def test_a_negative_token_count_is_refused() -> None:
    with pytest.raises(LayoutError, match="cannot hold -1 tokens"):
        SMOLLM2.pages_for(-1)
