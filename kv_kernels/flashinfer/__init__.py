"""FlashInfer's kernels on NVIDIA, through jax-tvm-ffi."""

from kv_kernels.flashinfer.provider import FlashInferProvider

__all__ = ["FlashInferProvider"]
