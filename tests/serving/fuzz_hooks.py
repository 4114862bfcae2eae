"""Hooks of Schemathesis that bring bodies into reach of an answer: what alone would have them refused is put right.

Named in SCHEMATHESIS_HOOKS; without them nearly all bodies are refused for one number out of range.
"""

import contextlib
from typing import Any

import schemathesis

VOCAB_SIZE = 270
RANGES = {
    "temperature": (0, 2),
    "top_p": (0.1, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.5, 2),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "max_tokens": (1, 6),
    "max_completion_tokens": (1, 6),
    "n": (1, 2),
    "min_tokens": (0, 3),
    "logprobs": (0, 5),
    "top_logprobs": (0, 5),
    "seed": (-(2**63), 2**63 - 1),
}
LEFT_OUT = ("model", "deadline_s", "suffix", "best_of", "dimensions", "stream_options")
TOKENS = ("prompt", "input", "tokens", "stop_token_ids")


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def known_tokens(value: Any) -> Any:
    """Token ids, in whatever lists they are, as some that the tiny model has."""
    if isinstance(value, list):
        return [known_tokens(each) for each in value][:40]
    return value % VOCAB_SIZE if isinstance(value, int) and not isinstance(value, bool) else value


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    if not isinstance(case.body, dict):
        return
    body = {name: value for name, value in case.body.items() if name not in LEFT_OUT}
    for name, (low, high) in RANGES.items():
        if is_number(body.get(name)):
            body[name] = min(max(body[name], low), high)
    for name in TOKENS:
        if name in body:
            body[name] = known_tokens(body[name]) or [5]
    if isinstance(body.get("logit_bias"), dict):
        with contextlib.suppress(ValueError):
            body["logit_bias"] = {str(int(key) % VOCAB_SIZE): value for key, value in body["logit_bias"].items()}
    case.body = body
