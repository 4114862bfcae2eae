"""Programs with the code that users get, where tests.conftest has the others compiled in less time."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
from jax._src import compiler


@contextlib.contextmanager
def full_code() -> Iterator[None]:
    """What compiles inside has all of LLVM's optimizations and XLA's own emitters, and nothing else uses it."""
    light = compiler.get_compile_options

    def full(*args: Any, **settings: Any) -> Any:
        options = light(*args, **settings)
        debug_options = options.executable_build_options.debug_options
        debug_options.xla_backend_optimization_level = 3
        debug_options.xla_llvm_disable_expensive_passes = False
        options.env_option_overrides = [*options.env_option_overrides, ("xla_cpu_use_fusion_emitters", True)]
        return options

    jax.clear_caches()
    with mock.patch.object(compiler, "get_compile_options", full):
        yield
    jax.clear_caches()
