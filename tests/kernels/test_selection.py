"""Which provider runs, and what is said when none can."""

import logging
from types import SimpleNamespace

import jax
import pytest

from kv_kernels import selection
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
        ProviderError, match=r"unknown provider 'fast'; choose auto or one of native, pallas, reference"
    ):
        choose_provider(NEEDS, "fast")


@pytest.mark.parametrize("requested", ["auto", "native", "reference"])
def test_what_a_provider_lacks_is_a_refusal_at_start(requested):
    with pytest.raises(ProviderError, match="int8"):
        choose_provider(KernelNeeds("cpu", "int8", 4, 2, 8, 16), requested)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_a_gpu_gets_our_own_kernels(platform):
    chosen = choose_provider(KernelNeeds(platform, "bfloat16", 4, 2, 8, 16))
    assert chosen.provider == selection.PallasProvider(interpret=False)


def test_a_gpu_falls_back_to_plain_xla_where_our_kernels_lack_something():
    chosen = choose_provider(KernelNeeds("cuda", "bfloat16", 8, 2, 512, 16))
    assert chosen.provider.name == "reference"
    assert "head_dim 512" in chosen.reason


def test_a_cpu_interprets_the_kernels_of_a_gpu_only_when_asked_to():
    assert choose_provider(NEEDS, "pallas").provider == selection.PallasProvider(interpret=True)


@pytest.mark.parametrize(
    ("backend", "version", "platform"),
    [("cpu", "", "cpu"), ("gpu", "PJRT C API\ncuda 13000", "cuda"), ("gpu", "PJRT C API\nrocm 70000", "rocm")],
)
def test_the_two_kinds_of_gpu_are_told_apart(monkeypatch, backend, version, platform):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    client = SimpleNamespace(platform_version=version)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(client=client)])
    assert current_platform() == platform
