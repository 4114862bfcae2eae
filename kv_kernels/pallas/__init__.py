"""Our own Triton kernels, written in Pallas: CUDA and ROCm, and interpreted on a CPU."""

from kv_kernels.pallas.provider import PallasProvider

__all__ = ["PallasProvider"]
