"""A FlashInfer that runs on a CPU: Python functions with the vendor's signatures, over the vendor's operands.

Signatures are those of csrc/page.cu, csrc/batch_prefill.cu and csrc/batch_decode.cu; the layout of plans is
PrefillPlanInfo's and DecodePlanInfo's of include/flashinfer/attention/scheduler.cuh, in CUDA-graph mode. A run computes
the work items that the schedule lists and no other, and leaves the rest of its output as it finds it.
"""

from typing import Any

import numpy as np
from attention_model import attend_row, reporting

from kv_kernels.flashinfer.library import PrebuiltModules

TILE = 16  # packed query rows
MIN_ITEMS = 6  # as if so many filled the GPU


class FlashInferStandIn(PrebuiltModules):
    platform = "cpu"
    in_command_buffers = False
    owned_tensors = True

    def why_missing(self, modules):
        return None

    def load(self, module: str) -> Any:
        kinds = {"page": PageModule, "batch_prefill": PrefillModule, "batch_decode": DecodeModule}
        loaded = next(kind for prefix, kind in kinds.items() if module.startswith(prefix))(module)
        for name in ("append_paged_kv_cache", "paged_run", "run"):
            if hasattr(loaded, name):
                setattr(loaded, name, reporting(getattr(loaded, name)))
        return loaded


class PageModule:
    def __init__(self, uri: str) -> None:
        pass

    def append_paged_kv_cache(
        self,
        append_key,
        append_value,
        batch_indices,
        positions,
        paged_k_cache,
        paged_v_cache,
        kv_indices,
        kv_indptr,
        kv_last_page_len,
        layout,
    ) -> None:
        assert layout == 0
        assert kv_indptr.shape[0] == kv_last_page_len.shape[0] + 1
        fresh = map(np.from_dlpack, (append_key, append_value, batch_indices, positions))
        kept = map(np.from_dlpack, (paged_k_cache, paged_v_cache, kv_indices, kv_indptr))
        (key, value, batch, position), (k_pool, v_pool, pages, indptr) = fresh, kept
        assert key.dtype == k_pool.dtype
        for token in range(len(key)):
            at, offset = divmod(int(indptr[batch[token]]) * k_pool.shape[1] + int(position[token]), k_pool.shape[1])
            k_pool[pages[at], offset], v_pool[pages[at], offset] = key[token], value[token]


class Workspaces:
    """Hands out parts of the two workspaces, and refuses what does not fit, as the vendor's allocator does."""

    def __init__(self, float_bytes: int, schedule: np.ndarray) -> None:
        self._float_bytes, self._floats = float_bytes, 0
        self._schedule, self._end = schedule, 0

    def place(self, values: np.ndarray, entries: int) -> int:
        start = -(-self._end // 16) * 16
        self._end = start + entries * values.itemsize
        assert self._end <= len(self._schedule), "int workspace too small"
        self._schedule[start : start + values.nbytes] = values.view(np.uint8)
        return start

    def reserve_floats(self, entries: int) -> int:
        start, self._floats = self._floats, self._floats + 4 * entries
        assert self._floats <= self._float_bytes, "float workspace too small"
        return start


class AttentionModule:
    def __init__(self, uri: str) -> None:
        assert "dtype_q_f16_dtype_kv_f16_dtype_o_f16_dtype_idx_i32" in uri
        self._windowed, self._capped = "use_swa_True" in uri, "use_logits_cap_True" in uri

    def check_variant(self, window_left: int, soft_cap: float) -> None:
        assert (window_left >= 0, soft_cap > 0) == (self._windowed, self._capped)


class PrefillModule(AttentionModule):
    def plan(
        self,
        float_workspace_buffer,
        int_workspace_buffer,
        page_locked_int_workspace_buffer,
        qo_indptr,
        kv_indptr,
        kv_len_arr,
        total_num_rows,
        batch_size,
        num_qo_heads,
        num_kv_heads,
        page_size,
        enable_cuda_graph,
        head_dim_qk,
        head_dim_vo,
        causal,
        window_left,
        fixed_split_size,
        disable_split_kv,
        num_colocated_ctas,
        uniform_q_len,
    ):
        assert enable_cuda_graph
        assert causal
        assert (fixed_split_size, disable_split_kv, num_colocated_ctas, uniform_q_len) == (-1, False, 0, 0)
        starts, pages, lengths = map(np.from_dlpack, (qo_indptr, kv_indptr, kv_len_arr))
        assert all(array.dtype == np.int32 for array in (starts, pages, lengths))
        assert len(starts) == len(pages) == batch_size + 1
        assert starts[-1] <= total_num_rows
        queries = np.diff(starts)
        # The causal kernel is wrong for a request of more queries than keys.
        assert (lengths >= queries).all()
        assert (lengths > (np.diff(pages) - 1) * page_size).all()
        assert (lengths <= np.diff(pages) * page_size).all()
        group = num_qo_heads // num_kv_heads
        tiles = -(-queries * group // TILE)
        request = np.repeat(np.arange(batch_size, dtype=np.int32), tiles)
        tile = np.concatenate([np.arange(count, dtype=np.int32) for count in tiles])
        padded = max(MIN_ITEMS, -(-total_num_rows * group // TILE) + batch_size - 1)
        assert len(request) <= padded
        space = Workspaces(float_workspace_buffer.shape[0], np.from_dlpack(page_locked_int_workspace_buffer))
        assert int_workspace_buffer.shape == page_locked_int_workspace_buffer.shape
        request_at, tile_at = space.place(request, padded), space.place(tile, padded)
        none = np.zeros(0, np.int32)
        kv_tile_at, o_at, merge_at, chunk_at = (
            space.place(none, entries) for entries in (padded, batch_size + 1, total_num_rows + 1, 1)
        )
        rows_at = space.place(starts[-1:].copy(), 1)
        v_at = space.reserve_floats(num_qo_heads * padded * TILE * head_dim_vo)
        s_at = space.reserve_floats(num_qo_heads * padded * TILE)
        valid_at = space.place(np.arange(padded) < len(request), padded)
        info = [padded, total_num_rows, rows_at, TILE, request_at, tile_at, kv_tile_at, merge_at, o_at, chunk_at]
        return [*info, v_at, s_at, valid_at, True, True]

    def paged_run(
        self,
        float_workspace_buffer,
        int_workspace_buffer,
        plan_info_vec,
        q,
        paged_k_cache,
        paged_v_cache,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        o,
        maybe_lse,
        mask_mode_code,
        layout,
        window_left,
        enable_pdl,
        maybe_custom_mask,
        maybe_mask_indptr,
        maybe_alibi_slopes,
        maybe_prefix_len_ptr,
        maybe_token_pos_in_items_ptr,
        maybe_max_item_len_ptr,
        maybe_k_cache_sf,
        maybe_v_cache_sf,
        logits_soft_cap,
        sm_scale,
        rope_rcp_scale,
        rope_rcp_theta,
        token_pos_in_items_len,
    ) -> None:
        optional = (maybe_lse, maybe_custom_mask, maybe_mask_indptr, maybe_alibi_slopes, maybe_prefix_len_ptr)
        optional += (maybe_token_pos_in_items_ptr, maybe_max_item_len_ptr, maybe_k_cache_sf, maybe_v_cache_sf)
        assert optional == (None,) * 9
        assert (mask_mode_code, layout, enable_pdl, token_pos_in_items_len) == (1, 0, False, 0)
        assert (rope_rcp_scale, rope_rcp_theta) == (1.0, 1e-4)
        assert float_workspace_buffer.shape[0] >= 128 << 20
        self.check_variant(window_left, logits_soft_cap)
        info = [int(entry) for entry in plan_info_vec]
        assert len(info) == 15
        items, total_rows, tile_rows = info[0], info[1], info[3]
        schedule = np.from_dlpack(int_workspace_buffer)
        request, tile = (schedule[at : at + 4 * items].view(np.int32) for at in info[4:6])
        valid = schedule[info[12] : info[12] + items].view(np.bool_)
        query, out, k_pool, v_pool = map(np.from_dlpack, (q, o, paged_k_cache, paged_v_cache))
        rows = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        starts, indptr, pages, last_page_len = map(np.from_dlpack, rows)
        assert total_rows == len(query)
        group = query.shape[1] // k_pool.shape[2]
        out[...] = np.nan
        for row in set(request[valid].tolist()):
            first, last = starts[row : row + 2]
            mine = pages[indptr[row] : indptr[row + 1]]
            values = attend_row(
                *(query[first:last], k_pool, v_pool, mine, last_page_len[row]),
                scale=sm_scale,
                window_left=window_left,
                soft_cap=logits_soft_cap,
            )
            for index in tile[valid & (request == row)]:
                packed = np.arange(index * tile_rows, min((index + 1) * tile_rows, (last - first) * group))
                token, member = packed // group, packed % group
                heads = np.arange(k_pool.shape[2])[:, None] * group + member
                out[first + token, heads] = values[token, heads]


class DecodeModule(AttentionModule):
    def plan(
        self,
        float_workspace_buffer,
        int_workspace_buffer,
        page_locked_int_workspace_buffer,
        indptr,
        batch_size,
        num_qo_heads,
        num_kv_heads,
        page_size,
        enable_cuda_graph,
        window_left,
        logits_soft_cap,
        head_dim_qk,
        head_dim_vo,
        empty_q_data,
        empty_kv_data,
    ):
        assert enable_cuda_graph
        assert num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8)
        assert head_dim_qk == head_dim_vo
        self.check_variant(window_left, logits_soft_cap)
        pages = np.diff(np.from_dlpack(indptr))
        assert len(pages) == batch_size
        assert (pages >= 1).all()
        padded = max(MIN_ITEMS, batch_size)
        space = Workspaces(float_workspace_buffer.shape[0], np.from_dlpack(page_locked_int_workspace_buffer))
        request_at = space.place(np.arange(batch_size, dtype=np.int32), padded)
        none = np.zeros(0, np.int32)
        kv_tile_at, o_at, chunk_at = (space.place(none, entries) for entries in (padded, batch_size + 1, 1))
        v_at = space.reserve_floats(num_qo_heads * padded * head_dim_vo)
        s_at = space.reserve_floats(num_qo_heads * padded)
        valid_at = space.place(np.arange(padded) < batch_size, padded)
        return [padded, v_at, s_at, request_at, kv_tile_at, o_at, valid_at, chunk_at, True, True]

    def run(
        self,
        float_workspace_buffer,
        int_workspace_buffer,
        plan_info_vec,
        q,
        paged_k_cache,
        paged_v_cache,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        o,
        maybe_lse,
        kv_layout_code,
        window_left,
        enable_pdl,
        maybe_alibi_slopes,
        logits_soft_cap,
        sm_scale,
        rope_rcp_scale,
        rope_rcp_theta,
    ) -> None:
        assert (maybe_lse, maybe_alibi_slopes, kv_layout_code, enable_pdl) == (None, None, 0, False)
        assert (rope_rcp_scale, rope_rcp_theta) == (1.0, 1e-4)
        assert float_workspace_buffer.shape[0] >= 128 << 20
        self.check_variant(window_left, logits_soft_cap)
        info = [int(entry) for entry in plan_info_vec]
        assert len(info) == 10
        schedule = np.from_dlpack(int_workspace_buffer)
        request = schedule[info[3] : info[3] + 4 * info[0]].view(np.int32)
        valid = schedule[info[6] : info[6] + info[0]].view(np.bool_)
        query, k_pool, v_pool, indptr, pages, last_page_len, out = map(
            np.from_dlpack,
            (q, paged_k_cache, paged_v_cache, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, o),
        )
        assert len(indptr) == len(query) + 1
        out[...] = np.nan
        for row in request[valid]:
            mine = pages[indptr[row] : indptr[row + 1]]
            out[row : row + 1] = attend_row(
                *(query[row : row + 1], k_pool, v_pool, mine, last_page_len[row]),
                scale=sm_scale,
                window_left=window_left,
                soft_cap=logits_soft_cap,
            )
