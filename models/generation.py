"""How a checkpoint asks to be sampled: generation_config.json, or a GGUF's token ids.

Defaults only: whoever makes a request decides. A checkpoint that says do_sample=false, or nothing, asks for greedy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from models.config import ModelConfigError
from models.config_fields import ConfigFields, read_json


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def generation_from_directory(directory: Path, config: Mapping[str, Any]) -> GenerationDefaults:
    """From generation_config.json, end tokens falling back to config.json's.

    Raises:
        ModelConfigError: unreadable, or a value of the wrong type or out of its range.
    """
    path = directory / "generation_config.json"
    fields = ConfigFields(read_json(path) if path.exists() else {}, path.name)
    eos = _ids(fields if "eos_token_id" in fields else ConfigFields(config, "config.json"))
    penalty = _number(fields, "repetition_penalty", 1.0, "above 0", lambda value: value > 0)
    if not fields.take("do_sample", bool, False):
        return GenerationDefaults(eos_token_ids=eos, repetition_penalty=penalty)
    return GenerationDefaults(
        eos_token_ids=eos,
        temperature=_number(fields, "temperature", 1.0, "0 or more", lambda value: value >= 0),
        top_k=int(_number(fields, "top_k", 0, "0 or more", lambda value: value >= 0)),
        top_p=_number(fields, "top_p", 1.0, "above 0 and at most 1", lambda value: 0 < value <= 1),
        min_p=_number(fields, "min_p", 0.0, "from 0 to 1", lambda value: 0 <= value <= 1),
        repetition_penalty=penalty,
    )


def generation_from_gguf(metadata: Mapping[str, Any]) -> GenerationDefaults:
    """The end-of-sequence, end-of-turn and end-of-message tokens that the file names."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ids = [metadata[key] for key in keys if metadata.get(key) is not None]
    return GenerationDefaults(eos_token_ids=tuple(dict.fromkeys(int(token) for token in ids)))


def _number(fields: ConfigFields, name: str, default: float, wanted: str, is_valid: Callable[[float], bool]) -> float:
    """A number of the default's type, in the range that `wanted` puts in words."""
    value: float = fields.take(name, type(default), default)
    if not is_valid(value):
        raise ModelConfigError(f"{fields.origin} has {name}={value}, expected {wanted}: fix the file")
    return value


def _ids(fields: ConfigFields) -> tuple[int, ...]:
    if isinstance(fields.peek("eos_token_id"), list):
        tokens = fields.take("eos_token_id", list)
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
            raise ModelConfigError(f"{fields.origin} has eos_token_id={tokens}, expected token ids: fix the file")
        return tuple(tokens)
    token = fields.take("eos_token_id", int, None)
    return () if token is None else (token,)
