"""FlashInfer's prebuilt modules: where they lie, how they are loaded without torch, how XLA comes to call them.

A module is a tvm-ffi library named by its configuration. They are looked for under `JAXKV_FLASHINFER_MODULES`, then in
an installed flashinfer-jit-cache. A function that takes an optional argument needs a Python wrapper, because only that
can pass None. XLA calls one while it records a command buffer, not when it replays it: that is allowed because a call
has no state beyond its operands and attributes. Nothing here is imported before it is asked for.
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from kv_kernels.flashinfer.calls import Call

MODULES_VARIABLE = "JAXKV_FLASHINFER_MODULES"

_REGISTERED: set[tuple[str, str]] = set()
"""Targets and platforms that XLA knows: once for the process, and it takes no other function for one."""


class FlashInferLibrary(Protocol):
    """What the provider asks of FlashInfer."""

    def why_missing(self, modules: Sequence[str]) -> str | None:
        """Why one of `modules` cannot be used, in one line, or None where all can."""

    def register(self, call: Call) -> None:
        """Make the target of `call` callable; called whenever a call of it is traced."""

    def plan(self, module: str, scratch_bytes: int, schedule: np.ndarray, *arguments: Any) -> tuple[int, ...]:
        """Call a module's `plan` with scratch_bytes of float workspace; it fills `schedule` [bytes] u8, zeroed, in
        host memory. `arguments` are those after the three workspaces, numpy arrays and numbers.
        """


class PrebuiltModules:
    """Modules on disk, called on `platform` ("gpu", or "cpu" for a stand-in)."""

    platform = "gpu"
    in_command_buffers = True
    owned_tensors = False

    def __init__(self) -> None:
        self._modules: dict[str, Any] = {}
        self._scratches: dict[int, jax.Array] = {}

    def why_missing(self, modules: Sequence[str]) -> str | None:
        for package in ("tvm_ffi", "jax_tvm_ffi"):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed; install jaxkv with its cuda extra"
        for module in modules:
            if find_module(module) is None:
                return (
                    f"no prebuilt module {module}; install flashinfer-jit-cache, or set {MODULES_VARIABLE} to a folder "
                    "of them"
                )
        return None

    def register(self, call: Call) -> None:
        if (call.target, self.platform) in _REGISTERED:
            return
        import jax_tvm_ffi

        jax_tvm_ffi.register_ffi_target(
            call.target,
            call.adapted(getattr(self._loaded(call.module), call.function)),
            list(call.arg_spec),
            platform=self.platform,
            allow_cuda_graph=self.in_command_buffers,
            pass_owned_tensor=self.owned_tensors,
        )
        _REGISTERED.add((call.target, self.platform))

    def plan(self, module: str, scratch_bytes: int, schedule: np.ndarray, *arguments: Any) -> tuple[int, ...]:
        import tvm_ffi

        tensors = [
            tvm_ffi.from_dlpack(each) if isinstance(each, np.ndarray | jax.Array) else each
            for each in (self._scratch(scratch_bytes), self._scratch(schedule.nbytes), schedule, *arguments)
        ]
        return tuple(int(entry) for entry in self._loaded(module).plan(*tensors))

    def load(self, module: str) -> Any:
        """The module, by whose attributes its functions are called."""
        import tvm_ffi

        return tvm_ffi.load_module(str(find_module(module)))

    def _loaded(self, module: str) -> Any:
        if module not in self._modules:
            self._modules[module] = self.load(module)
        return self._modules[module]

    def _scratch(self, num_bytes: int) -> jax.Array:
        # `plan` copies its schedule into one of these and takes the size of the other. Nothing reads them: the step
        # gets the schedule as an operand, copied by XLA in the order of its own stream.
        if num_bytes not in self._scratches:
            self._scratches[num_bytes] = jax.block_until_ready(jnp.zeros(num_bytes, jnp.uint8))
        return self._scratches[num_bytes]


PREBUILT = PrebuiltModules()


def find_module(module: str) -> Path | None:
    """The file of a prebuilt module."""
    folders = [Path(folder) for folder in (os.environ.get(MODULES_VARIABLE),) if folder]
    package = importlib.util.find_spec("flashinfer_jit_cache")
    if package is not None:
        folders += [Path(place) / "jit_cache" for place in package.submodule_search_locations or ()]
    candidates = (folder / module / f"{module}.so" for folder in folders)
    return next((path for path in candidates if path.is_file()), None)
