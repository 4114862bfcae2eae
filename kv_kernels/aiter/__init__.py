"""AITER's kernels on AMD, through jax-aiter."""

from kv_kernels.aiter.provider import AiterProvider

__all__ = ["AiterProvider"]
