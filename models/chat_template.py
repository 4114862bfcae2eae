"""Chat templates: jinja2 in a sandbox, set up the way model authors expect.

A template is code from a download: it runs sandboxed, sees only the values handed to `render`, and whatever it raises
becomes one line. Rendered text holds its special tokens already: encode it with parse_special and without add_special.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from kv_common.errors import JaxkvError
from models.config_fields import read_json
from models.tokenizer import Tokenizer


class ChatTemplateError(JaxkvError):
    """A template that cannot be compiled, or that refuses or fails on the messages given."""


class ChatTemplate:
    """A compiled chat template.

    Raises:
        ChatTemplateError: the source is not a valid template.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"the model's chat template is invalid ({_line(error)}): use raw prompts or another template"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text of `messages`, each with a role and a content.

        Raises:
            ChatTemplateError: the template refuses them, e.g. for a role or an order it does not know.
        """
        values = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt, **self._tokens}
        try:
            return self._template.render(values)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise ChatTemplateError(f"the model's chat template refuses the messages: {_line(error)}") from error


def template_from_directory(directory: Path, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """From chat_template.jinja, else tokenizer_config.json's chat_template (of several, the one named `default`).

    Raises:
        ChatTemplateError: the template cannot be read or is not valid.
    """
    path, config_path = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if path.exists():
        try:
            return _with_tokens(path.read_text(encoding="utf-8"), tokenizer)
        except (OSError, UnicodeDecodeError) as error:
            raise ChatTemplateError(f"cannot read {path} ({_line(error)}): get the file again") from error
    source = read_json(config_path).get("chat_template") if config_path.exists() else None
    if isinstance(source, list):
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[0].get("template") if named else None
    return _with_tokens(source, tokenizer) if isinstance(source, str) else None


def template_from_gguf(metadata: Mapping[str, Any], tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """From tokenizer.chat_template."""
    source = metadata.get("tokenizer.chat_template")
    return _with_tokens(source, tokenizer) if isinstance(source, str) else None


def _with_tokens(source: str, tokenizer: Tokenizer | None) -> ChatTemplate:
    if tokenizer is None:
        return ChatTemplate(source)
    bos, eos = tokenizer.token_text(tokenizer.bos_token_id), tokenizer.token_text(tokenizer.eos_token_id)
    return ChatTemplate(source, bos_token=bos, eos_token=eos)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes HTML, which is not what a model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__
