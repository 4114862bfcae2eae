"""What the kernels of one step walk over: tiles of queries for rows of many tokens, splits of keys for rows of one.

Contract: int32 arrays padded to the step's shape, so that one compiled program serves every step of it; the kernels
loop to counts that they read from here, so padding costs an empty program and no more. Splits are `SPLIT_KEYS` keys
counted from position 0, so a token's reduction has one order whatever its batch; only a step with more splits than
`MAX_SPLITS` takes longer ones, since a partial result per split and head has to be stored.
"""

from typing import NamedTuple

import numpy as np

from kv_common.page_table import KvPageTableV1
from kv_kernels.provider import PlanShape

TILE_TOKENS = 64
SPLIT_KEYS = 256
MAX_SPLITS = 4096
NO_KEY = np.iinfo(np.int32).max
"""First key of a split of padding: above every position."""


class PallasPlan(NamedTuple):
    """A step's work. An entry is a query token that attends by splits; in a shape of one token a row all tokens are
    entries, and there are no tiles.
    """

    tiles: np.ndarray  # [4, tiles] first token, tokens, position of the first token, first page entry
    entries: np.ndarray  # [3, entries] token (-1 for none), position, first page entry
    entry_splits: np.ndarray  # [entries + 1] where the splits of an entry begin
    splits: np.ndarray  # [2, splits] entry, first key
    split_keys: np.ndarray  # [1] keys of a split
    page_ids: np.ndarray  # [page_entries] pages of layer 0


def make_plan(table: KvPageTableV1, shape: PlanShape) -> PallasPlan:
    """The plan of a step padded to `shape`."""
    query_len = np.diff(table.query_start)
    position = table.kv_len - query_len
    first_entry = table.page_indptr[:-1]
    one_token_a_row = shape.tokens == shape.rows
    if one_token_a_row:
        row = np.repeat(np.arange(len(query_len)), query_len)
        entries = np.stack([np.arange(len(row)), table.positions, first_entry[row]])
        tiles = np.zeros((4, 0), np.int32)
    else:
        single = query_len == 1
        entries = np.stack([table.query_start[:-1], position, first_entry])[:, single]
        tiles = _tiles(table, shape, np.flatnonzero(~single))
    room = shape.rows + min(shape.page_entries * table.tokens_per_page // SPLIT_KEYS, MAX_SPLITS)
    entry_splits, splits, split_keys = _splits(entries[1] + 1, room)
    # Tokens of padding are entries without a split, or in a tile without a key: their values are 0.
    padding = np.full((3, shape.rows - entries.shape[1]), -1)
    if one_token_a_row:
        padding[0] = np.arange(entries.shape[1], shape.rows)
    return PallasPlan(
        tiles=tiles,
        entries=np.concatenate([entries, padding], axis=1).astype(np.int32),
        entry_splits=_padded(entry_splits, shape.rows + 1, int(entry_splits[-1])),
        splits=np.stack([_padded(splits[0], room, 0), _padded(splits[1], room, NO_KEY)]),
        split_keys=np.asarray([split_keys], np.int32),
        page_ids=_padded(table.page_ids, shape.page_entries, 0),
    )


def _tiles(table: KvPageTableV1, shape: PlanShape, rows: np.ndarray) -> np.ndarray:
    """Tiles of `rows`, and of the tokens of padding, whose positions lie before every key."""
    end = int(table.query_start[-1])
    start = np.append(table.query_start[:-1][rows], end)
    length = np.append(np.diff(table.query_start)[rows], shape.tokens - end)
    position = np.append((table.kv_len - np.diff(table.query_start))[rows], -shape.tokens)
    first_entry = np.append(table.page_indptr[:-1][rows], 0)
    counts = -(-length // TILE_TOKENS)
    which = np.repeat(np.arange(len(start)), counts)
    offset = (np.arange(len(which)) - (np.cumsum(counts) - counts)[which]) * TILE_TOKENS
    tiles = np.zeros((4, shape.tokens // TILE_TOKENS + shape.rows + 1), np.int32)
    tiles[0, : len(which)] = start[which] + offset
    tiles[1, : len(which)] = np.minimum(length[which] - offset, TILE_TOKENS)
    tiles[2, : len(which)] = position[which] + offset
    tiles[3, : len(which)] = first_entry[which]
    return tiles


class _Splits(NamedTuple):
    """entry_splits [entries + 1], splits [2, splits], and keys in a split."""

    starts: np.ndarray
    splits: np.ndarray
    keys: int


def _splits(kv_len: np.ndarray, room: int) -> _Splits:
    """At most `room` splits, which is no less than the number of entries."""
    keys = SPLIT_KEYS
    counts = -(-kv_len // keys)
    while counts.sum() > room:
        keys *= 2
        counts = -(-kv_len // keys)
    starts = np.concatenate([[0], np.cumsum(counts)])
    entry = np.repeat(np.arange(len(counts)), counts)
    return _Splits(starts, np.stack([entry, (np.arange(len(entry)) - starts[entry]) * keys]), keys)


def _padded(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out
