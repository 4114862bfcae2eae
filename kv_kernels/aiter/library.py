"""jax-aiter as this package sees it: which of its kernels are there, how they are registered, what they are called.

Nothing of it is imported before it is asked for. The shims of the paged kernels are built apart from the rest of
jax-aiter (`make -f Makefile.kv ja_kv` there), so an installation can lack them.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

APPEND, PREFILL, DECODE = "AppendKvJA", "PagedPrefillJA", "PagedAttentionJA"
TARGETS = (APPEND, PREFILL, DECODE)


class DecodeKernel(NamedTuple):
    """One compiled decode kernel: its name, and what a call of it needs."""

    func_name: str
    max_num_partitions: int
    workspace_bytes: int


class AiterLibrary(Protocol):
    """What the provider asks of jax-aiter."""

    def why_missing(self) -> str | None:
        """Why the paged kernels cannot be used, in one line, or None where they can."""

    def register(self, target: str) -> None:
        """Make `target` callable; called whenever a call of it is traced."""

    def decode_kernel(
        self, *, query: jax.ShapeDtypeStruct, kv_heads: int, tokens_per_page: int, max_seq_len: int
    ) -> DecodeKernel:
        """The kernel for `query` [rows, heads, head_dim] over rows of at most `max_seq_len` keys."""


class JaxAiter:
    """The installed jax-aiter."""

    def why_missing(self) -> str | None:
        try:
            from jax_aiter.ffi.registry import standalone_symbol_available
        except ImportError as error:
            return f"no jax-aiter with paged kernels is installed ({error}); build one from ROCm/jax-aiter"
        missing = [target for target in TARGETS if not standalone_symbol_available(target)]
        if missing:
            return f"jax-aiter has no {', '.join(missing)}; build them there with 'make -f Makefile.kv ja_kv'"
        return None

    def register(self, target: str) -> None:
        from jax_aiter.ffi.registry import register_ffi_target

        register_ffi_target(target, "ROCM")

    def decode_kernel(
        self, *, query: jax.ShapeDtypeStruct, kv_heads: int, tokens_per_page: int, max_seq_len: int
    ) -> DecodeKernel:
        from jax_aiter.kv import pa_config

        rows, heads, head_dim = query.shape
        dtype = jnp.dtype(query.dtype)
        config = pa_config.make_config(
            gqa_ratio=heads // kv_heads,
            head_size=head_dim,
            max_seq_len=max_seq_len,
            dtype=dtype,
            block_size=tokens_per_page,
        )
        return DecodeKernel(
            func_name=pa_config.func_name(config),
            max_num_partitions=pa_config.max_num_partitions(max_seq_len),
            workspace_bytes=pa_config.workspace_bytes(rows, heads, head_dim, max_seq_len, dtype),
        )


JAX_AITER = JaxAiter()
