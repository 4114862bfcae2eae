"""Which provider runs, and what is said when none can."""

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from kv_kernels.native import NativeProvider
from kv_kernels.native.library import NativeLibrary
from kv_kernels.pallas import PallasProvider
from kv_kernels.provider import KernelNeeds
from kv_kernels.selection import ProviderError, choose_provider, current_platform

NEEDS = KernelNeeds("cpu", "float32", num_heads=4, num_kv_heads=2, head_dim=8, tokens_per_page=16)


def test_auto_takes_the_first_that_serves_and_logs_why(caplog):
    with caplog.at_level(logging.INFO):
        chosen = choose_provider(NEEDS)
    assert chosen.provider.name == "native"
    assert chosen.reason in caplog.text


def test_an_unknown_platform_gets_plain_xla():
    assert choose_provider(KernelNeeds("tpu", "float32", 4, 2, 8, 16)).provider.name == "reference"


def test_an_unknown_provider_is_refused_with_the_known_ones():
    with pytest.raises(
        ProviderError,
        match=r"unknown provider 'fast'; choose auto or one of native, flashinfer, aiter, pallas, reference",
    ):
        choose_provider(NEEDS, "fast")


@pytest.mark.parametrize("requested", ["auto", "native", "reference"])
def test_what_a_provider_lacks_is_a_refusal_at_start(requested):
    with pytest.raises(ProviderError, match="int8"):
        choose_provider(KernelNeeds("cpu", "int8", 4, 2, 8, 16), requested)


def test_activations_of_eight_bits_are_for_the_native_kernels_that_gain_by_them(monkeypatch):
    needs = dataclasses.replace(NEEDS, int8_activations=True)
    monkeypatch.setattr(NativeLibrary, "has_int8_products", True)
    assert choose_provider(needs).provider == NativeProvider(int8_activations=True)
    with pytest.raises(ProviderError, match="multiplies activations as they are: leave int8_activations out"):
        choose_provider(needs, "reference")
    monkeypatch.setattr(NativeLibrary, "has_int8_products", False)
    with pytest.raises(ProviderError, match=r"native: its kernels for .* gain nothing by int8_activations: leave them"):
        choose_provider(needs)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_a_gpu_gets_our_own_kernels(platform):
    chosen = choose_provider(KernelNeeds(platform, "bfloat16", 4, 2, 8, 16))
    assert chosen.provider == PallasProvider(interpret=False)


def test_a_gpu_falls_back_to_plain_xla_where_our_kernels_lack_something():
    chosen = choose_provider(KernelNeeds("cuda", "bfloat16", 8, 2, 512, 16))
    assert chosen.provider.name == "reference"
    assert "head_dim 512" in chosen.reason


def test_a_cpu_interprets_the_kernels_of_a_gpu_only_when_asked_to():
    assert choose_provider(NEEDS, "pallas").provider == PallasProvider(interpret=True)


def test_a_cpu_does_not_wait_for_the_kernels_of_a_gpu():
    code = (
        "import sys, kv_kernels.selection as s; from kv_kernels.provider import KernelNeeds as N;"
        "s.choose_provider(N('cpu', 'float32', 4, 2, 8, 16)); print('kv_kernels.pallas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("backend", "version", "platform"),
    [("cpu", "", "cpu"), ("gpu", "PJRT C API\ncuda 13000", "cuda"), ("gpu", "PJRT C API\nrocm 70000", "rocm")],
)
def test_the_two_kinds_of_gpu_are_told_apart(monkeypatch, backend, version, platform):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    client = SimpleNamespace(platform_version=version)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(client=client)])
    assert current_platform() == platform


GPU_NEEDS = {"kv_dtype": "bfloat16", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "tokens_per_page": 16}


@pytest.mark.parametrize(
    ("platform", "vendor", "reason"),
    [
        ("cuda", "flashinfer", "tvm_ffi is not installed; install jaxkv with its cuda extra"),
        ("rocm", "aiter", "no jax-aiter with paged kernels is installed (No module named 'jax_aiter"),
    ],
)
def test_a_vendor_that_is_not_installed_is_passed_over_with_the_reason(monkeypatch, platform, vendor, reason):
    for name in ("tvm_ffi", "jax_aiter"):
        monkeypatch.setitem(sys.modules, name, None)
    chosen = choose_provider(KernelNeeds(platform, **GPU_NEEDS))
    assert chosen.provider.name != vendor
    assert f"not {vendor}: {reason}" in chosen.reason
    assert "\n" not in chosen.reason
    with pytest.raises(ProviderError, match=f"provider '{vendor}' cannot serve this model: .* use provider"):
        choose_provider(KernelNeeds(platform, **GPU_NEEDS), vendor)


@pytest.mark.parametrize(
    ("platform", "vendor", "change", "reason"),
    [
        ("cuda", "flashinfer", {"kv_dtype": "float32"}, "K/V dtype float32 is not one of bfloat16, float16"),
        ("cuda", "flashinfer", {"head_dim": 80}, "head_dim 80 is not one of 64, 128, 256"),
        ("cpu", "flashinfer", {}, "its kernels run on cuda, not on cpu"),
        ("rocm", "aiter", {"kv_dtype": "float8_e4m3fn"}, "K/V dtype float8_e4m3fn is not one of"),
        ("rocm", "aiter", {"head_dim": 256}, "head_dim 256 is not one of 64, 128"),
        ("rocm", "aiter", {"tokens_per_page": 64}, "pages of 64 tokens: it has 16 and 32"),
        ("rocm", "aiter", {"soft_cap": 30.0}, "a soft cap of 30: its kernels have none"),
        ("cuda", "aiter", {}, "its kernels run on rocm, not on cuda"),
    ],
)
def test_what_a_vendor_has_no_kernel_for_is_refused_with_the_numbers(platform, vendor, change, reason):
    with pytest.raises(ProviderError, match=f"provider '{vendor}' cannot serve this model: {reason}"):
        choose_provider(KernelNeeds(platform, **(GPU_NEEDS | change)), vendor)


def test_a_module_that_was_not_built_is_named(monkeypatch, tmp_path):
    pytest.importorskip("jax_tvm_ffi", reason="it is looked for before any module is")
    monkeypatch.setenv("JAXKV_FLASHINFER_MODULES", str(tmp_path))
    for name in ("page", "batch_prefill_with_kv_cache_"):
        with pytest.raises(ProviderError, match=f"no prebuilt module {name}.*or set JAXKV_FLASHINFER_MODULES"):
            choose_provider(KernelNeeds("cuda", **GPU_NEEDS), "flashinfer")
        (tmp_path / "page").mkdir(exist_ok=True)
        (tmp_path / "page" / "page.so").touch()


def test_no_vendor_is_imported_before_it_is_asked_for():
    code = "import sys, kv_kernels.selection; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"tvm_ffi", "jax_tvm_ffi", "jax_aiter"} & set(done.stdout.split())


def test_a_platform_that_is_not_there_is_one_line():
    code = "from kv_kernels.selection import current_platform\ncurrent_platform()"
    environment = os.environ | {"JAX_PLATFORMS": "cuda", "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    last = ended.stderr.strip().splitlines()[-1]
    assert "PlatformError: jax finds no device of the platforms that it was told to use: unset JAX_PLATFORMS" in last
