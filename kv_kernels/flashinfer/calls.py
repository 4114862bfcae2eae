"""Calls of FlashInfer's functions as XLA custom calls: targets, and how operands, results and attributes become the
vendor's arguments.

Contract: `arg_spec` is what jax-tvm-ffi hands over, in that order; `adapted` puts it into the order of the vendor's
signature, which is FlashInfer 0.7's. Results of a custom call are its outputs and its scratch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PAGE_MODULE = "page"

NHD = 0
CAUSAL = 1
_NO_LSE, _NO_PDL = None, False
_NO_ROPE_SCALE, _NO_ROPE_THETA = 1.0, 1e-4  # read by kernels that rotate, which these modules are not


@dataclass(frozen=True)
class Modules:
    """Names of the modules for one kind of attention."""

    kv_dtype: str
    head_dim: int
    window: bool
    soft_cap: bool

    @property
    def prefill(self) -> str:
        return f"batch_prefill_with_kv_cache_{self._configuration}_f16qk_False"

    @property
    def decode(self) -> str:
        return f"batch_decode_with_kv_cache_{self._configuration}"

    @property
    def _configuration(self) -> str:
        dtype = {"bfloat16": "bf16", "float16": "f16"}[self.kv_dtype]
        return (
            f"dtype_q_{dtype}_dtype_kv_{dtype}_dtype_o_{dtype}_dtype_idx_i32_head_dim_qk_{self.head_dim}_"
            f"head_dim_vo_{self.head_dim}_posenc_0_use_swa_{self.window}_use_logits_cap_{self.soft_cap}"
        )


@dataclass(frozen=True)
class Call:
    """A function of a module as a custom call."""

    module: str
    function: str
    arg_spec: tuple[str, ...]
    adapted: Callable[[Any], Any]

    @property
    def target(self) -> str:
        return f"flashinfer.{self.module}.{self.function}"


def _append(function: Any) -> Any:
    # The operands are the arguments: the pools among them are the results' own buffers.
    return function


def _prefill(function: Any) -> Any:
    def run(*given: Any) -> None:
        schedule, tensors, (out, scratch) = given[0], given[1:8], given[8:10]
        plan_info, mask_mode, layout, window_left, soft_cap, scale = given[10:]
        # None: custom mask and its indptr, ALiBi slopes, three of multi-item scoring, two scales of FP4 pools.
        function(
            *(scratch, schedule, plan_info, *tensors, out, _NO_LSE, mask_mode, layout, window_left, _NO_PDL),
            *(None,) * 8,
            *(soft_cap, scale, _NO_ROPE_SCALE, _NO_ROPE_THETA, 0),
        )

    return run


def _decode(function: Any) -> Any:
    def run(*given: Any) -> None:
        schedule, tensors, (out, scratch) = given[0], given[1:7], given[7:9]
        plan_info, layout, window_left, soft_cap, scale = given[9:]
        function(
            *(scratch, schedule, plan_info, *tensors, out, _NO_LSE, layout, window_left, _NO_PDL),
            *(None, soft_cap, scale, _NO_ROPE_SCALE, _NO_ROPE_THETA),  # None: ALiBi slopes
        )

    return run


APPEND = Call(PAGE_MODULE, "append_paged_kv_cache", ("args", "attrs.layout"), _append)


def prefill_call(module: str) -> Call:
    """`paged_run` of a prefill module."""
    attributes = ("plan_info", "mask_mode", "layout", "window_left", "logits_soft_cap", "sm_scale")
    return Call(module, "paged_run", ("args", "rets", *(f"attrs.{name}" for name in attributes)), _prefill)


def decode_call(module: str) -> Call:
    """`run` of a decode module."""
    attributes = ("plan_info", "layout", "window_left", "logits_soft_cap", "sm_scale")
    return Call(module, "run", ("args", "rets", *(f"attrs.{name}" for name in attributes)), _decode)
