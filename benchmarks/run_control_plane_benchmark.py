"""Host work of one decode step: schedule, reserve, confirm, build and retire, with no device and no model.

Every request decodes one token a step through the real scheduler, over a pool that has been churned first, so that its
pages are scattered and dirty as they are in a server that has run for a while. Requests stand at different offsets
within their pages: in each step some of them take a new page. Wall-clock time is what a step waits for; CPU time of the
same steps is printed beside it, because it holds still on a machine that others use. JSON lines, and a table on stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import NamedTuple

import numpy as np
from reporting import Figure, figure_from_passes, print_figure

from kv_common.layout import KvStorageLayoutV1
from kv_control.page_allocator import PageAllocator
from kv_control.scheduler import Scheduler
from kv_control.step_plan import StepPlan

TOKENS_PER_PAGE = 16
PREFILL_TOKENS_PER_STEP = 1 << 20
WARM_UP_STEPS = 2 * TOKENS_PER_PAGE
RELEASE_CHUNK = 64
MAX_DISAGREEMENT = 0.25


class Workload(NamedTuple):
    """`requests` live requests of about `context` tokens each, in a pool of `pages` pages."""

    requests: int
    context: int
    pages: int


class Passes(NamedTuple):
    """Microseconds per step of each pass, by the wall clock and of this thread's CPU time."""

    wall_us: list[float]
    cpu_us: list[float]


HEADLINE = Workload(requests=256, context=4096, pages=100_000)
OVER_REQUESTS = tuple(Workload(requests, 4096, 1_200_000) for requests in (16, 64, 256, 1024, 4096))
OVER_PAGES = tuple(Workload(256, 256, pages) for pages in (10_000, 100_000, 1_000_000))


def main() -> None:
    """Measure the headline, then how it grows with requests and with pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--passes", type=int, default=7, help="measurements of each workload (default 7)")
    parser.add_argument("--steps", type=int, default=32, help="decode steps in a pass (default 32)")
    parser.add_argument("--headline", action="store_true", help="only 256 requests of 4k tokens, no sweeps")
    arguments = parser.parse_args()
    series: dict[str, tuple[Workload, ...]] = {"headline": (HEADLINE,)}
    if not arguments.headline:
        series |= {"over_requests": OVER_REQUESTS, "over_pages": OVER_PAGES}
    print(
        f"{'':<14} {'requests':>8} {'context':>8} {'pages':>9} {'wall us':>10} {'cpu us':>10} {'/request':>10}",
        file=sys.stderr,
    )
    for name, workloads in series.items():
        for workload in workloads:
            report(name, workload, measure(workload, arguments.passes, arguments.steps))


def measure(workload: Workload, passes: int, steps: int) -> Passes:
    """Time `passes` times `steps` decode steps of `workload`, after a warm-up."""
    scheduler = steady_state(workload, decode_steps=WARM_UP_STEPS + passes * steps)
    for _ in range(WARM_UP_STEPS):
        retire(scheduler, decode_plan(scheduler, workload))
    result = Passes([], [])
    for _ in range(passes):
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            retire(scheduler, decode_plan(scheduler, workload))
        result.wall_us.append((time.perf_counter() - wall) / steps * 1e6)
        result.cpu_us.append((time.thread_time() - cpu) / steps * 1e6)
    scheduler.residency.check_invariants()
    return result


def steady_state(workload: Workload, decode_steps: int) -> Scheduler:
    """A scheduler whose requests have all been prefilled, with room for `decode_steps` more tokens each."""
    layout = KvStorageLayoutV1(
        num_layers=1, num_kv_heads=1, head_dim=1, num_pages=workload.pages, tokens_per_page=TOKENS_PER_PAGE
    )
    # Who is prefilled first decodes while the others are prefilled; a few tokens more, so that no request ends.
    prefill_steps = workload.requests * (workload.context + TOKENS_PER_PAGE) // PREFILL_TOKENS_PER_STEP + 1
    new_tokens = decode_steps + prefill_steps + 2
    scheduler = Scheduler(
        layout,
        max_requests=workload.requests,
        max_step_tokens=PREFILL_TOKENS_PER_STEP,
        max_context=workload.context + TOKENS_PER_PAGE + new_tokens,
    )
    churn(scheduler.residency.allocator)
    rng = np.random.default_rng(1)  # prompts of their own, so that none finds another's pages in the cache
    for request in range(workload.requests):
        tokens = workload.context + request % TOKENS_PER_PAGE
        prompt = rng.integers(0, 1000, tokens).astype(np.int32)
        scheduler.submit(request, prompt, max_new_tokens=new_tokens)
    while scheduler.num_waiting or np.any(scheduler.running.num_tokens <= scheduler.running.prompt_len):
        plan = scheduler.schedule()
        if plan is None or plan.preempted:
            raise SystemExit(f"{workload} and {new_tokens} new tokens overflow the pool: use fewer passes or steps")
        retire(scheduler, plan)
    return scheduler


def churn(allocator: PageAllocator) -> None:
    """Free every page once, in random order: what is dealt afterwards is scattered and dirty."""
    pages = np.random.default_rng(0).permutation(allocator.allocate(allocator.free_pages))
    for start in range(0, pages.size, RELEASE_CHUNK):
        allocator.release(pages[start : start + RELEASE_CHUNK])


def decode_plan(scheduler: Scheduler, workload: Workload) -> StepPlan:
    """The next plan, which must be one token for each request."""
    plan = scheduler.schedule()
    if plan is None or plan.table.tokens != workload.requests:
        raise SystemExit(f"{workload}: a step was not one token for each request, so the passes would differ")
    return plan


def retire(scheduler: Scheduler, plan: StepPlan) -> None:
    """Report a sampled token for every row."""
    scheduler.retire(plan, np.ones((1, plan.rows.size), np.int32))


def report(series: str, workload: Workload, passes: Passes) -> None:
    """Print the figures of one workload and its row of the table."""
    wall = figure_of(f"control_plane.{series}.step_wall", passes.wall_us, "us/step", workload)
    cpu = figure_of(f"control_plane.{series}.step_cpu", passes.cpu_us, "us/step", workload)
    per_request = [value / workload.requests for value in passes.cpu_us]
    for figure in (
        wall,
        cpu,
        figure_of(f"control_plane.{series}.step_cpu_per_request", per_request, "us/request", workload),
    ):
        print_figure(figure)
    noisy = [name for name, figure in (("wall", wall), ("cpu", cpu)) if not figure.reportable]
    note = f"  passes disagree: {', '.join(noisy)}" if noisy else ""
    print(
        f"{series:<14} {workload.requests:>8} {workload.context:>8} {workload.pages:>9} "
        f"{wall.value:>10.1f} {cpu.value:>10.1f} {cpu.value / workload.requests:>10.3f}{note}",
        file=sys.stderr,
    )


def figure_of(name: str, passes: list[float], unit: str, workload: Workload) -> Figure:
    """A figure of this benchmark: host integers, one thread."""
    described = {**workload._asdict(), "tokens_per_page": TOKENS_PER_PAGE, "step": "decode", "pool": "churned"}
    return figure_from_passes(
        name, passes, unit, workload=described, dtype="int32", threads=1, max_disagreement=MAX_DISAGREEMENT
    )


if __name__ == "__main__":
    main()
