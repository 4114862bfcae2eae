"""What every test shares: the CPU platform, reproducible hypothesis runs, and where the data is."""

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# jax reads this when it is first imported; tests/gpu is run with JAX_PLATFORMS set by hand.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# So are these: the tests of tensor parallelism spread models over eight devices, which a CPU has only when told so; and
# what a test compiles for seconds runs for milliseconds. Four fifths of that are LLVM's optimizations and XLA's newer
# emitters, which only the tests have that ask for `fully_optimized`, and those that `make test-slow` runs anew. XLA's
# own passes are everywhere what users have.
FLAGS = ["--xla_force_host_platform_device_count=8"]
# The threads of these devices meet for each sum, and XLA ends the process where one is 40 s late: on a machine that
# pauses, or runs much else, that is no fault of anybody's.
FLAGS += ["--xla_cpu_collective_call_terminate_timeout_seconds=600"]
if os.environ["JAX_PLATFORMS"] == "cpu" and "JAXKV_TEST_PROVIDER" not in os.environ:
    FLAGS += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    FLAGS += ["--xla_cpu_use_fusion_emitters=false"]
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))
# No test may depend on what another run has compiled, or leave anything in the user's cache; so also where one starts
# a process.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

# A trace makes objects by the hundred thousand, and hardly any is garbage that waits for the collector.
gc.set_threshold(50_000, 20, 20)

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session", autouse=True)
def _compile_each_program_once() -> Iterator[None]:
    """Many engines are made, most of whose programs another had: this process keeps them in a folder while it runs."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    with tempfile.TemporaryDirectory(prefix="jaxkv-tests-") as folder:
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        # A module that computes while it is imported has made jax see that there is no cache, which it does but once.
        compilation_cache.reset_cache()
        yield
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture
def fully_optimized() -> Iterator[None]:
    """What compiles meanwhile has the code that users get: for tests of bits, of memory, and of a real model."""
    from full_code import full_code

    with full_code():
        yield


MANY_MAPPINGS = 15_000
"""Of the 65,530 that Linux lets a process have: every compiled program takes some."""


@pytest.fixture(scope="module", autouse=True)
def _let_go_of_what_was_compiled() -> Iterator[None]:
    """One process runs thousands of tests, and XLA crashes where it gets no memory for a program."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > MANY_MAPPINGS:
        import jax

        gc.collect()
        jax.clear_caches()


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of reference inputs and outputs that the tests compare with."""
    return Path(__file__).resolve().parent / "data" / "golden"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real model that the tests run; its absence is a failure, so that no test passes by not running."""
    path = Path(os.environ.get("JAXKV_TEST_GGUF", REPOSITORY / ".cache" / "models" / MODEL_FILE))
    if not path.is_file():
        pytest.fail(f"{path} is missing: run 'make model', or set JAXKV_TEST_GGUF to a copy of {MODEL_FILE}")
    return path
