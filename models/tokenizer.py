"""Text to token ids and back, over the `tokenizers` library.

Ids and text are those of the model's own tokenizer; nothing is cleaned up. Text that looks like a special token is one
only with parse_special, so that untrusted text can be kept from closing a chat turn.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from kv_common.errors import JaxkvError
from models.config_fields import read_json

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerError(JaxkvError):
    """A tokenizer that cannot be read or is not implemented, or what it was given cannot be encoded or decoded."""


class Tokenizer:
    """One model's tokenizer. bos_token_id, eos_token_id: None where the model has none."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        prepend_bos: bool = False,
    ) -> None:
        # A file can carry the settings of its last training batch; a prompt is never cut or padded.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._prepend_bos = prepend_bos and bos_token_id is not None
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        """Tokens, special ones included."""
        self.plain_vocab_size: int = backend.get_vocab_size(with_added_tokens=False)
        """Tokens of the vocabulary itself, without those that were added to it."""

    def encode(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        """Token ids of `text`.

        parse_special: text of special tokens becomes those tokens; otherwise it is ordinary text.
        add_special: put what the model expects around a prompt (a leading BOS, for some). Not for a rendered chat
        template, which has it already.

        Raises:
            TokenizerError: `text` has surrogates, which no encoding can carry.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text has a lone surrogate at character {error.start}: pass valid Unicode text"
            ) from error
        backend = self._backend if parse_special else self._plain_backend
        ids = backend.encode(text, add_special_tokens=add_special).ids
        if add_special and self._prepend_bos and self.bos_token_id is not None:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that form no character become U+FFFD.

        Raises:
            TokenizerError: an id is outside the vocabulary.
        """
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise TokenizerError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """What one token contributes to the text; a part of a character is possible.

        Raises:
            TokenizerError: the id is outside the vocabulary.
        """
        text = self._backend.id_to_token(token) if 0 <= token < self.vocab_size else None
        if text is None:
            raise TokenizerError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        if self._is_byte_level:
            if all(character in _BYTE_OF_CHARACTER for character in text):
                return bytes(_BYTE_OF_CHARACTER[character] for character in text)
            return text.encode()
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(byte[1], 16)]) if byte else text.replace("\u2581", " ").encode()

    def to_json(self) -> str:
        """The tokenizer as the `tokenizers` library writes it to a file."""
        return self._backend.to_str()

    def token_text(self, token: int | None) -> str:
        """The token as the vocabulary spells it; empty for None."""
        return "" if token is None else self._backend.id_to_token(token) or ""

    def token_id(self, text: str) -> int | None:
        """The id of the token that the vocabulary spells `text`."""
        return self._backend.token_to_id(text)

    def completes_text(self, token: int) -> bool:
        """False for a single-byte token of a byte-fallback vocabulary: what follows can still change how it decodes."""
        return self._is_byte_level or _BYTE_TOKEN.fullmatch(self.token_text(token)) is None

    @functools.cached_property
    def special_texts(self) -> re.Pattern[str] | None:
        """What finds the name of a special token in a text; None where there are none. Names of one character, which
        cannot be written otherwise, are not among them.
        """
        added = self._backend.get_added_tokens_decoder().values()
        names = sorted((each.content for each in added if each.special and len(each.content) > 1), key=len)
        return re.compile("|".join(map(re.escape, reversed(names)))) if names else None

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._backend.to_str())["decoder"])

    @functools.cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        # A second one, because the switch is a mutable property and requests share the tokenizer across threads.
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend


def tokenizer_from_directory(directory: Path) -> Tokenizer | None:
    """From tokenizer.json and tokenizer_config.json; None where there is no tokenizer at all.

    Raises:
        TokenizerError: the tokenizer is of another kind than tokenizer.json, or damaged.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        for other in ("tokenizer.model", "vocab.json", "tekken.json"):
            if (directory / other).exists():
                raise TokenizerError(
                    f"{directory} has {other} and no tokenizer.json: convert it, or use a GGUF of the model"
                )
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for anything in the file
        raise TokenizerError(f"{path} cannot be read ({first_line(error)}): get the file again") from error
    config_path = directory / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    return Tokenizer(
        backend,
        bos_token_id=_special_id(backend, config.get("bos_token")),
        eos_token_id=_special_id(backend, config.get("eos_token")),
    )


def _special_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    """A special token as tokenizer_config.json gives it: text, or an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None


def first_line(error: Exception) -> str:
    """An error of the library, short enough for one of ours."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _byte_characters() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next free one from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("\xa1"), ord("\xac") + 1),
        *range(ord("\xae"), ord("\xff") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()
