"""What is said about a finished run: one line for people, one object for programs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kv_serving.generation_run import Job, RunReport

if TYPE_CHECKING:
    from kv_execution import EnginePlan, EngineStats


FEWEST_TOKENS = 8
"""Of fewer a rate would tell how long a step took, and little more."""


def summary_line(report: RunReport, plan: "EnginePlan", stats: "EngineStats") -> str:
    """Tokens a second for prefill and decode, pages used, and the provider."""
    return (
        f"generated {report.generated_tokens} tokens; prefill {_rate(report.prompt_tokens, report.prefill_s)}, "
        f"decode {_rate(report.decode_tokens, report.decode_s)}; "
        f"{stats.peak_pages_in_use} of {plan.layout.usable_pages} pages used; "
        f"provider {plan.provider} on {plan.platform}"
    )


def summary_object(
    prompts: Sequence[str], jobs: Sequence[Job], report: RunReport, plan: "EnginePlan", stats: "EngineStats"
) -> dict[str, Any]:
    """The answers and the same facts, as JSON values."""
    return {
        "model": plan.spec.name,
        "results": [
            {
                "prompt": prompt,
                "text": job.text,
                "finish_reason": job.finish_reason,
                "prompt_tokens": len(job.token_ids),
                "tokens": job.tokens,
            }
            for prompt, job in zip(prompts, jobs, strict=True)
        ],
        "prefill": {"tokens": report.prompt_tokens, "seconds": report.prefill_s},
        "decode": {"tokens": report.decode_tokens, "seconds": report.decode_s},
        "pages": {
            "peak": stats.peak_pages_in_use,
            "usable": plan.layout.usable_pages,
            "tokens_per_page": plan.layout.tokens_per_page,
        },
        "provider": plan.provider,
        "platform": plan.platform,
    }


def _rate(tokens: int, seconds: float) -> str:
    if tokens >= FEWEST_TOKENS and seconds > 0:
        return f"{tokens / seconds:.1f} tokens/s"
    return f"of {tokens or 'no'} token{'' if tokens == 1 else 's'}"
