"""The page at `/`, and the numbers that it shows.

One page without anything from elsewhere: it asks for `/status` every second and draws what it gets. It tells counts,
and nothing of any request.
"""

from importlib import resources
from typing import Any

from kv_common import __version__
from kv_serving.server.context import ServerContext

CONTENT_SECURITY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def page() -> str:
    """The page."""
    return resources.files("kv_serving.server").joinpath("status.html").read_text(encoding="utf-8")


def status_of(context: ServerContext) -> dict[str, Any]:
    """What it shows; counts are since the start."""
    status: dict[str, Any] = {
        "version": __version__,
        "model": context.name,
        "readiness": context.readiness,
        "active_requests": context.active_requests,
    }
    if context.engine.snapshot is not None:
        stats, prefix = context.engine.snapshot
        status |= {
            "running": stats.running,
            "waiting": stats.waiting,
            "pages_in_use": stats.pages_in_use,
            "pages_cached": stats.cached_pages,
            "pages_free": stats.free_pages,
            "prefill_tokens": stats.prefill_tokens,
            "decode_tokens": stats.decode_tokens,
            "steps": stats.steps,
            "preemptions": stats.preemptions,
            "compilations": stats.traces,
            "prefix_queries": prefix.asked_tokens,
            "prefix_hits": prefix.hit_tokens,
        }
    return status
