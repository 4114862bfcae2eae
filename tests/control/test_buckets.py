"""Shape buckets: the enumerated set is the reachable set, and every shape holds its step."""

import pytest

from kv_control.buckets import BucketError, ShapeBuckets, StepShape, page_entries, pages_per_row, scrub_entries

CONFIGURATIONS = [
    ShapeBuckets(max_rows=8, max_tokens=32, max_context=64, min_tokens=4, min_seqlen_k=8),
    ShapeBuckets(max_rows=6, max_tokens=25, max_context=50, min_tokens=3, min_seqlen_k=5),  # no power of two
    ShapeBuckets(max_rows=1, max_tokens=40, max_context=64, min_tokens=4, min_seqlen_k=4),  # long chunks, long rows
    ShapeBuckets(max_rows=1, max_tokens=1, max_context=33, min_seqlen_k=4),  # decode only
    ShapeBuckets(max_rows=2, max_tokens=60, max_context=11, min_tokens=2, min_seqlen_k=2),  # tokens end at the context
    ShapeBuckets(max_rows=7, max_tokens=7, max_context=1),  # contexts of one token never mix
    ShapeBuckets(max_rows=17, max_tokens=17, max_context=20, min_tokens=4, min_seqlen_k=2),  # fewer tokens than buckets
    ShapeBuckets(max_rows=5, max_tokens=9, max_context=40),  # ladders of a single entry
    ShapeBuckets(max_rows=3, max_tokens=48, max_context=40, min_tokens=1, min_seqlen_k=1),
    ShapeBuckets(max_rows=3, max_tokens=20, max_context=9, min_tokens=16, min_seqlen_k=1),  # 2 tokens need length 2
    ShapeBuckets(max_rows=3, max_tokens=24, max_context=5, min_tokens=2, min_seqlen_k=1),  # too short for most tokens
]


def legal_steps(buckets):
    """Every (tokens, rows, max_kv_len) that some step can have: the longest row holds at least its share of tokens."""
    for rows in range(1, buckets.max_rows + 1):
        for tokens in range(rows, buckets.max_tokens + 1):
            for max_kv_len in range(-(-tokens // rows), buckets.max_context + 1):
                yield tokens, rows, max_kv_len


@pytest.mark.parametrize("buckets", CONFIGURATIONS, ids=str)
def test_the_reachable_shapes_are_exactly_those_of_all_legal_steps(buckets):
    image = {buckets.shape_for(*step) for step in legal_steps(buckets)}
    reachable = buckets.reachable()
    assert set(reachable) == image
    assert len(reachable) == len(image)
    assert list(reachable) == sorted(reachable)


@pytest.mark.parametrize("buckets", CONFIGURATIONS, ids=str)
def test_every_shape_holds_its_step(buckets):
    for tokens, rows, max_kv_len in legal_steps(buckets):
        shape = buckets.shape_for(tokens, rows, max_kv_len)
        assert shape.tokens >= tokens
        assert shape.rows >= rows
        assert shape.max_seqlen_k >= max_kv_len


def test_every_size_is_a_power_of_two_and_no_more_than_twice_the_maximum():
    buckets = ShapeBuckets(max_rows=100, max_tokens=1500, max_context=5000)
    assert buckets.row_ladder == (1, 2, 4, 8, 16, 32, 64, 128)
    assert buckets.token_ladder == (16, 32, 64, 128, 256, 512, 1024, 2048)
    assert buckets.seqlen_ladder == (256, 1024, 4096, 8192)


def test_a_decode_step_has_as_many_tokens_as_rows():
    buckets = ShapeBuckets(max_rows=64, max_tokens=512, max_context=4096)
    assert buckets.shape_for(tokens=5, rows=5, max_kv_len=300) == StepShape(8, 8, 1024)


def test_a_prefill_of_one_token_is_a_decode_step():
    buckets = ShapeBuckets(max_rows=64, max_tokens=512, max_context=4096)
    assert buckets.shape_for(tokens=1, rows=1, max_kv_len=1) == StepShape(1, 1, 256)


def test_the_rows_of_a_mixed_step_follow_from_its_tokens():
    buckets = ShapeBuckets(max_rows=48, max_tokens=512, max_context=4096)
    assert buckets.shape_for(tokens=6, rows=5, max_kv_len=20) == StepShape(16, 16, 256)
    assert buckets.shape_for(tokens=300, rows=2, max_kv_len=400) == StepShape(512, 64, 1024)


def test_a_realistic_configuration_reaches_few_shapes():
    assert len(ShapeBuckets(max_rows=64, max_tokens=512, max_context=8192).reachable()) == 40


def test_a_long_chunk_of_one_row_cannot_have_a_short_context():
    shapes = ShapeBuckets(max_rows=1, max_tokens=4096, max_context=4096).reachable()
    assert StepShape(4096, 1, 4096) in shapes
    assert StepShape(4096, 1, 1024) not in shapes


def test_more_rows_than_tokens_is_refused():
    with pytest.raises(BucketError, match="max_rows 9 exceeds max_tokens 8"):
        ShapeBuckets(max_rows=9, max_tokens=8, max_context=64)


@pytest.mark.parametrize("name", ["max_rows", "max_tokens", "max_context", "min_tokens", "min_seqlen_k"])
def test_a_limit_below_one_is_refused_by_name(name):
    limits = {"max_rows": 4, "max_tokens": 8, "max_context": 64, name: 0}
    with pytest.raises(BucketError, match=f"{name} is 0"):
        ShapeBuckets(**limits)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ((4, 0, 10), "0 rows, outside 1 .. 4"),
        ((5, 5, 10), "5 rows, outside 1 .. 4"),
        ((2, 3, 10), "2 tokens in 3 rows"),
        ((9, 3, 10), "9 tokens in 3 rows, outside 3 .. 8"),
        ((4, 4, 65), "max_kv_len 65 outside 1 .. 64"),
        ((8, 3, 2), "max_kv_len 2 outside 3 .. 64"),
    ],
)
def test_an_impossible_step_is_refused_with_its_numbers(step, message):
    with pytest.raises(BucketError, match=message):
        ShapeBuckets(max_rows=4, max_tokens=8, max_context=64).shape_for(*step)


def test_derived_sizes_follow_from_the_shape():
    shape = StepShape(tokens=64, rows=8, max_seqlen_k=256)
    assert pages_per_row(shape, 16) == 16
    assert page_entries(shape, 16) == 128
    assert scrub_entries(shape, 16) == 12
    assert pages_per_row(shape, 48) == 6
    assert pages_per_row(StepShape(1, 1, 16), 64) == 1
