"""Finding the native library, choosing its instruction set, and what happens without it."""

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kv_kernels import native
from kv_kernels.native import NativeProvider, load_library
from kv_kernels.native.library import NativeLevelError
from kv_kernels.provider import KernelNeeds
from kv_kernels.selection import choose_provider

SHARED_HEADERS = {
    *("append.h", "attention_plan.h", "attention_work.h", "cpu_level.h"),
    *("kernels.h", "linear_call.h", "operands.h", "parallel.h"),
}
NEEDS = KernelNeeds("cpu", "float32", num_heads=4, num_kv_heads=2, head_dim=8, tokens_per_page=16)


@pytest.fixture
def not_built(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    load_library.cache_clear()
    yield
    load_library.cache_clear()


def test_without_the_library_the_reference_runs_and_one_line_says_why(not_built, caplog):
    with caplog.at_level(logging.INFO):
        assert choose_provider(NEEDS).provider.name == "reference"
    (line,) = caplog.messages
    assert "not native: the native kernels were not built" in line


def test_a_broken_library_is_a_reason_and_not_a_crash(monkeypatch, tmp_path):
    broken = tmp_path / "_kernels.so"
    broken.write_bytes(b"not a library")
    spec = importlib.util.spec_from_file_location("kv_kernels.native._kernels", broken)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    load_library.cache_clear()
    try:
        assert "cannot be loaded" in NativeProvider().unsupported(NEEDS)
    finally:
        load_library.cache_clear()


def test_another_platform_and_another_dtype_are_named():
    assert "not on cuda" in NativeProvider().unsupported(KernelNeeds("cuda", "float32", 4, 2, 8, 16))
    assert "int8" in NativeProvider().unsupported(KernelNeeds("cpu", "int8", 4, 2, 8, 16))


def test_an_unknown_instruction_set_is_refused_with_the_known_ones():
    with pytest.raises(NativeLevelError, match=r"no native kernels for 'sse9' on this CPU; use one of generic"):
        load_library().set_level("sse9")


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("generic", "generic"),
        ("GENERIC", "generic"),
        ("sse9", "no native kernels for 'sse9' on this CPU; use one of generic"),
    ],
)
def test_the_environment_asks_for_an_instruction_set(wanted, said):
    script = "\n".join(
        [
            "from kv_kernels.native.library import NativeLevelError, load_library",
            "try: print(load_library().level)",
            "except NativeLevelError as error: print(error)",
        ]
    )
    environment = {**os.environ, "JAXKV_NATIVE_LEVEL": wanted}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert said in run.stdout


def test_what_a_level_is_made_of_is_its_own():
    # Of an inline function that two levels share, the linker would keep one copy, compiled for one of them.
    headers = {path.name: path.read_text() for path in (Path(native.__file__).parent / "src").glob("*.h")}
    assert {name for name, text in headers.items() if "namespace jaxkv {\nnamespace {\n" not in text} == SHARED_HEADERS
