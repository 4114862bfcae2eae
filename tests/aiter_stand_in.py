"""A jax-aiter that runs on a CPU: Python handlers under the vendor's targets, over the vendor's operands.

Operands and attributes are those of csrc/ffi/kv/{append_kv,paged_prefill,paged_attention}_ja.cu; what the handlers
there refuse is refused here. Handlers are registered through jax-tvm-ffi.
"""

import hashlib
import itertools
from typing import ClassVar

import jax
import numpy as np
from attention_model import attend_row, reporting

from kv_kernels.aiter.library import DecodeKernel

PARTITION_SIZE = 256
TYPE_NAMES = {"bfloat16": "__hip_bfloat16", "float16": "_Float16"}


def decode_name(group: int, head_dim: int, dtype: str, tokens_per_page: int) -> str:
    """Nine values of a configuration: group, head_dim, loops over partitions, types of query, K/V, pool and output,
    page size, ALiBi.
    """
    name = TYPE_NAMES[dtype]
    values = (group, head_dim, 1, name, name, "auto", name, tokens_per_page, "false")
    signature = "_".join(str(value).lower() for value in values)
    return f"pa_ragged_{hashlib.md5(signature.encode(), usedforsecurity=False).hexdigest()}"


class DescribedAiter:
    """What a jax-aiter with every kernel says of itself; nothing of it can run."""

    def why_missing(self):
        return None

    def register(self, target: str) -> None:
        pass

    def decode_kernel(self, *, query: jax.ShapeDtypeStruct, kv_heads: int, tokens_per_page: int, max_seq_len: int):
        rows, heads, head_dim = query.shape
        assert max_seq_len <= 64 * PARTITION_SIZE
        partitions = -(-max_seq_len // PARTITION_SIZE)
        return DecodeKernel(
            func_name=decode_name(heads // kv_heads, head_dim, query.dtype.name, tokens_per_page),
            max_num_partitions=partitions,
            workspace_bytes=rows * heads * partitions * (2 * 4 + query.dtype.itemsize * head_dim),
        )


class AiterStandIn(DescribedAiter):
    _registered: ClassVar[set[str]] = set()  # by the process

    def register(self, target: str) -> None:
        import jax_tvm_ffi

        if target not in self._registered:
            handler, attributes = HANDLERS[target]
            spec = ["args", "rets", *(f"attrs.{name}" for name in attributes)]
            jax_tvm_ffi.register_ffi_target(target, reporting(handler), spec, platform="cpu", pass_owned_tensor=True)
        self._registered.add(target)

    def decode_kernel(self, **sizes):
        # jax-tvm-ffi 0.1.3 corrupts the heap when an attribute is a string of more than seven bytes.
        kernel = super().decode_kernel(**sizes)
        return kernel._replace(func_name=kernel.func_name[-7:])


def append_kv(k_new, v_new, slot_mapping, k_scale, v_scale, k_pool, v_pool, k_out, v_out, kv_cache_dtype) -> None:
    assert kv_cache_dtype == "auto"
    key, value, slots, k_pool, v_pool, k_out, v_out = map(
        np.from_dlpack, (k_new, v_new, slot_mapping, k_pool, v_pool, k_out, v_out)
    )
    assert (k_pool.ctypes.data, v_pool.ctypes.data) == (k_out.ctypes.data, v_out.ctypes.data)
    assert key.dtype == k_pool.dtype == np.float16
    assert slots.dtype == np.int32
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            at = divmod(slot, k_pool.shape[1])
            k_out[at], v_out[at] = key[token], value[token]


def paged_prefill(
    query,
    k_pool,
    v_pool,
    cu_seqlens_q,
    kv_indptr,
    kv_page_indices,
    kv_last_page_lens,
    out,
    scale,
    logits_soft_cap,
    max_seqlen_q,
    max_seqlen_k,
    causal,
    window_size_left,
    window_size_right,
) -> None:
    q, k_pool, v_pool, starts, indptr, pages, last_page_lens, out = map(
        np.from_dlpack, (query, k_pool, v_pool, cu_seqlens_q, kv_indptr, kv_page_indices, kv_last_page_lens, out)
    )
    assert q.dtype == k_pool.dtype == out.dtype
    assert all(array.dtype == np.int32 for array in (starts, indptr, pages, last_page_lens))
    assert len(starts) == len(indptr) == len(last_page_lens) + 1
    assert logits_soft_cap == 0
    assert causal
    assert window_size_right == (-1 if window_size_left < 0 else 0)
    assert np.diff(starts).max() <= max_seqlen_q
    assert ((np.diff(indptr) - 1) * k_pool.shape[1] + last_page_lens).max() <= max_seqlen_k
    out[...] = np.nan
    for row, (first, last) in enumerate(itertools.pairwise(starts)):
        if last > first:
            out[first:last] = attend_row(
                q[first:last],
                k_pool,
                v_pool,
                pages[indptr[row] : indptr[row + 1]],
                last_page_lens[row],
                scale=scale,
                window_left=window_size_left,
            )


def paged_attention(
    query,
    k_pool,
    v_pool,
    kv_indptr,
    kv_page_indices,
    kv_last_page_lens,
    k_scale,
    v_scale,
    workspace,
    out,
    scale,
    logits_soft_cap,
    max_num_partitions,
    func_name,
) -> None:
    q, k_pool, v_pool, indptr, pages, last_page_lens, k_scale, v_scale, out = map(
        np.from_dlpack,
        (query, k_pool, v_pool, kv_indptr, kv_page_indices, kv_last_page_lens, k_scale, v_scale, out),
    )
    tokens_per_page, kv_heads, head_dim = k_pool.shape[1:]
    compiled = {decode_name(group, 128, "float16", 16)[-7:] for group in (1, 4, 8)}
    assert func_name in compiled
    assert func_name == decode_name(q.shape[1] // kv_heads, head_dim, "float16", tokens_per_page)[-7:]
    assert (k_scale.tolist(), v_scale.tolist()) == ([1.0], [1.0])
    assert len(indptr) == len(q) + 1
    assert ((np.diff(indptr) - 1) * tokens_per_page + last_page_lens).max() <= max_num_partitions * PARTITION_SIZE
    assert workspace.shape[0] >= q.shape[0] * q.shape[1] * max_num_partitions * (8 + 2 * head_dim)
    out[...] = np.nan
    for row in range(len(q)):
        out[row : row + 1] = attend_row(
            q[row : row + 1],
            k_pool,
            v_pool,
            pages[indptr[row] : indptr[row + 1]],
            last_page_lens[row],
            scale=scale,  # and no soft cap: these kernels ignore it
        )


HANDLERS = {
    "AppendKvJA": (append_kv, ("kv_cache_dtype",)),
    "PagedPrefillJA": (
        paged_prefill,
        (
            "scale",
            "logits_soft_cap",
            "max_seqlen_q",
            "max_seqlen_k",
            "causal",
            "window_size_left",
            "window_size_right",
        ),
    ),
    "PagedAttentionJA": (paged_attention, ("scale", "logits_soft_cap", "max_num_partitions", "func_name")),
}
