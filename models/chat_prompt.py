"""A conversation as token ids, in which the text of a message is only ever text.

Contract: a special token that is spelled in a message, `<|im_end|>` say, becomes the characters of its name: it ends no
turn and begins none in another's name. Everything else is encoded as the rendered template is. Templates that mark
turns with plain words (`[INST]` of Llama 2) cannot be guarded so.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from models.chat_template import ChatTemplate, ChatTemplateError
from models.tokenizer import Tokenizer


def encode_messages(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Token ids of `messages` up to where their answer begins. Raises ChatTemplateError, TokenizerError."""
    mark = secrets.token_hex(16)  # which nobody can have in a message, and which goes through a template as it is

    def guarded(value: Any) -> Any:
        if isinstance(value, str):
            return _divided(value, tokenizer.special_texts, mark)
        if isinstance(value, Mapping):
            return {guarded(name): guarded(each) for name, each in value.items()}
        return [guarded(each) for each in value] if isinstance(value, (list, tuple)) else value

    try:
        text = template.render(guarded(messages), tools=guarded(tools))
    except RecursionError as error:
        raise ChatTemplateError("the messages or tools are nested too deeply: simplify them") from error
    return [token for part in text.split(mark) for token in tokenizer.encode(part, add_special=False)]


def _divided(text: str, special: re.Pattern[str] | None, mark: str) -> str:
    """`text` with a mark behind the first character of each name of a special token, so that no part has one."""
    while special is not None and special.search(text):
        text = special.sub(lambda name: name[0][0] + mark + name[0][1:], text)
    return text
