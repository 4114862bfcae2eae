"""The plain text of `jaxkv inspect`: what an engine would allocate and compile, one fact a line."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kv_serving.byte_size import format_byte_size

if TYPE_CHECKING:
    from kv_control.buckets import StepShape
    from kv_execution import EnginePlan


def plan_lines(plan: "EnginePlan") -> list[str]:
    """The report of one plan, without line ends."""
    spec, layout = plan.spec, plan.layout
    heads = f"{spec.num_heads} heads over {spec.num_kv_heads} K/V heads of {spec.head_dim}"
    facts = [
        ("model", f"{spec.name} ({spec.architecture})"),
        ("parameters", f"{spec.num_parameters:,} in {format_byte_size(spec.parameter_bytes)}"),
        ("compute", f"{spec.dtype}, {spec.num_layers} layers of {heads}"),
        ("context", f"{plan.max_context:,} tokens, {layout.pages_for(plan.max_context):,} pages"),
        ("page", f"{layout.tokens_per_page} tokens, {format_byte_size(layout.bytes_per_page)} in {layout.dtype}"),
        ("pool", f"{layout.num_pages:,} pages in {format_byte_size(layout.total_pool_bytes)}, 1 of them padding"),
        ("holds", f"{layout.usable_tokens:,} tokens, {_full_requests(plan)}"),
        ("memory", _memory(plan)),
        ("provider", f"{plan.provider} on {plan.platform}: {plan.provider_reason}"),
        ("shapes", f"{len(plan.shapes)} step programs to compile, as tokens x rows: K/V lengths"),
    ]
    width = max(len(name) for name, _ in facts)
    return [*(f"{name:<{width}}  {fact}" for name, fact in facts), *shape_lines(plan.shapes, indent=width + 2)]


def shape_lines(shapes: Sequence["StepShape"], indent: int) -> list[str]:
    """One line for each (tokens, rows), listing the K/V lengths that it is compiled for."""
    lengths: dict[tuple[int, int], list[int]] = {}
    for shape in shapes:
        lengths.setdefault((shape.tokens, shape.rows), []).append(shape.max_seqlen_k)
    sizes = [f"{tokens} x {rows}" for tokens, rows in lengths]
    width = max(map(len, sizes), default=0)
    return [
        f"{'':{indent}}{size:>{width}}: {' '.join(str(length) for length in sorted(each))}"
        for size, each in zip(sizes, lengths.values(), strict=True)
    ]


def _memory(plan: "EnginePlan") -> str:
    """What the plan takes beside what there is, since no pool is allocated that would show it."""
    needed = plan.spec.parameter_bytes + plan.layout.total_pool_bytes
    if plan.platform != "cpu" or not hasattr(os, "sysconf"):
        return f"{format_byte_size(needed)} for parameters and pools"
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    verdict = "this machine has" if needed <= present else "too much: this machine has only"
    return f"{format_byte_size(needed)} for parameters and pools; {verdict} {format_byte_size(present)}"


def _full_requests(plan: "EnginePlan") -> str:
    full = plan.layout.usable_pages // plan.layout.pages_for(plan.max_context)
    if full == 0:
        return "less than one request of full context"
    return f"{full:,} request{'s' * (full != 1)} of full context"
