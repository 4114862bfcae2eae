"""Weights of four bits whose rows lie together by sixteens: the same values, elsewhere."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_case import random_weight

from kv_kernels.dequantize import dequantize
from kv_kernels.weights import BlockQuantWeight, can_be_tiled, take_columns, take_layer, take_rows, tiled, untiled


def rows_of(kind: str, *stack: int, out_features: int = 48, in_features: int = 96) -> BlockQuantWeight:
    weight = random_weight(3, kind, *stack, out_features=out_features, in_features=in_features)
    return jax.tree.map(np.asarray, weight)


@pytest.mark.parametrize("kind", ["q4_0", "q4_1"])
@pytest.mark.parametrize("stack", [(), (3,), (2, 2)])
def test_a_weight_in_tiles_is_the_same_weight(kind: str, stack: tuple[int, ...]) -> None:
    weight = rows_of(kind, *stack)
    tiles = tiled(weight)
    assert (tiles.stack, tiles.out_features, tiles.in_features) == (stack, 48, 96)
    assert tiles.nbytes == weight.nbytes
    assert tiles.quants.shape == (*stack, 3, 16 * 48)
    np.testing.assert_array_equal(dequantize(tiles, jnp.float32), dequantize(weight, jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, untiled(tiles), weight)
    assert untiled(weight) is weight


def test_the_rows_of_a_tile_lie_where_a_vector_takes_them() -> None:
    weight = rows_of("q4_1")
    tiles = tiled(weight)
    blocks = tiles.quants.reshape(3, 3, 16, 16)  # tile, block, place, bytes
    for row in range(16):
        place = 4 * (row % 4) + row // 4
        np.testing.assert_array_equal(blocks[2, 1, place], weight.quants[32 + row, 16:32])
    np.testing.assert_array_equal(tiles.scales.reshape(3, 3, 16)[2, 1], weight.scales[32:, 1])
    np.testing.assert_array_equal(tiles.mins.reshape(3, 3, 16)[1, 0], weight.mins[16:32, 0])


@pytest.mark.parametrize("kind", ["q4_0", "q4_1"])
def test_layers_and_rows_are_taken_as_from_any_weight(kind: str) -> None:
    weight = rows_of(kind, 2)
    layer = jax.jit(take_layer)(tiled(weight), 1)
    rows = jnp.array([0, 47, 16, 5, 48, -1])
    got = take_rows(layer, rows)
    assert got.quants.shape == (6, 48)
    np.testing.assert_array_equal(
        dequantize(got, jnp.float32), np.asarray(dequantize(weight, jnp.float32))[1][[0, 47, 16, 5, 47, 0]]
    )


@pytest.mark.parametrize(("start", "stop"), [(0, 32), (32, 64), (64, 96), (0, 96)])
def test_columns_are_taken_as_from_any_weight(start: int, stop: int) -> None:
    weight = rows_of("q4_1", 2, in_features=96)
    got = untiled(take_columns(tiled(weight), start, stop))
    jax.tree.map(np.testing.assert_array_equal, got, take_columns(weight, start, stop))


@pytest.mark.parametrize(
    ("weight", "possible"),
    [
        (rows_of("q4_0"), True),
        (rows_of("q4_1"), True),
        (rows_of("q4_1", out_features=40), False),
        (rows_of("q8_0"), False),
        (rows_of("q5_0"), False),
        (rows_of("q4_k"), False),
        (rows_of("q4_1/groups"), False),
        (dataclasses.replace(rows_of("q4_0"), scales=np.ones((48, 3), np.float32)), False),
        (dataclasses.replace(rows_of("q4_1"), mins=np.ones((48, 1), np.float16)), False),
    ],
)
def test_tiles_are_for_four_bits_with_a_float16_for_every_block(weight: BlockQuantWeight, possible: bool) -> None:
    assert can_be_tiled(weight) == possible
