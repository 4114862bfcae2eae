"""The report of `jaxkv inspect` states every number of the plan."""

import dataclasses
import os

import pytest
from serving_fakes import PLAN

from kv_serving.plan_report import plan_lines


@pytest.fixture(autouse=True)
def machine_of_4_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20}.__getitem__)


def test_the_plan_is_printed_fact_by_fact() -> None:
    assert plan_lines(PLAN) == [
        "model       parrot (llama)",
        "parameters  1,234,567 in 3.0 MiB",
        "compute     float32, 2 layers of 4 heads over 2 K/V heads of 8",
        "context     100 tokens, 7 pages",
        "page        16 tokens, 4.0 KiB in float32",
        "pool        21 pages in 84.0 KiB, 1 of them padding",
        "holds       320 tokens, 2 requests of full context",
        "memory      3.1 MiB for parameters and pools; this machine has 4.0 GiB",
        "provider    reference on cpu: the only one",
        "shapes      3 step programs to compile, as tokens x rows: K/V lengths",
        "             1 x 1: 256 1024",
        "            16 x 1: 256",
    ]


def test_a_pool_below_one_full_request_says_so() -> None:
    lines = plan_lines(PLAN._replace(max_context=10_000))
    assert "holds       320 tokens, less than one request of full context" in lines


def test_a_plan_beyond_the_machine_s_memory_says_so() -> None:
    plan = PLAN._replace(spec=dataclasses.replace(PLAN.spec, parameter_bytes=5 << 30))
    assert "memory      5.0 GiB for parameters and pools; too much: this machine has only 4.0 GiB" in plan_lines(plan)
