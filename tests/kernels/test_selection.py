"""Which provider runs, and what is said when none can."""

import logging

import pytest

from kv_kernels.provider import KernelNeeds
from kv_kernels.selection import ProviderError, choose_provider

NEEDS = KernelNeeds("cpu", "float32", num_heads=4, num_kv_heads=2, head_dim=8, tokens_per_page=16)


def test_auto_takes_the_first_that_serves_and_logs_why(caplog):
    with caplog.at_level(logging.INFO):
        chosen = choose_provider(NEEDS)
    assert chosen.provider.name == "native"
    assert chosen.reason in caplog.text


def test_an_unknown_platform_gets_plain_xla():
    assert choose_provider(KernelNeeds("tpu", "float32", 4, 2, 8, 16)).provider.name == "reference"


def test_an_unknown_provider_is_refused_with_the_known_ones():
    with pytest.raises(ProviderError, match=r"unknown provider 'fast'; choose auto or one of native, reference"):
        choose_provider(NEEDS, "fast")


@pytest.mark.parametrize("requested", ["auto", "native", "reference"])
def test_what_a_provider_lacks_is_a_refusal_at_start(requested):
    with pytest.raises(ProviderError, match="int8"):
        choose_provider(KernelNeeds("cpu", "int8", 4, 2, 8, 16), requested)
