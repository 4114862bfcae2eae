"""Grammars that hold an answer to a form: compiled beside the event loop, kept, and copied for each answer.

Contract: an answer that ends by itself is of its form; one that is cut short by max_tokens may be the beginning of one.
Where the form is complete, the model's end tokens are all that may come.
"""

import asyncio
import json
import logging
import urllib.parse
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from kv_common.errors import JaxkvError

if TYPE_CHECKING:
    from kv_common.model_spec import ModelSpec
    from models import Tokenizer

logger = logging.getLogger(__name__)

# A model that has nothing to say might otherwise write spaces until its tokens run out.
_JSON: Any = {"whitespace_pattern": r"[ \n\r\t]{0,32}"}
_ENDLESS = "refers to itself without end, so that there is no answer: change it"
MOST_KEPT = 128
"""Grammars that stay compiled."""


class GrammarError(JaxkvError):
    """A form that no answer can be held to."""


class GrammarConstraint:
    """One answer on its way through a grammar; see TokenConstraint."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, end_mask: NDArray[np.uint32]) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // 32)
        self._end_mask = end_mask

    def allowed(self) -> NDArray[np.uint32]:
        """The tokens that the grammar allows next."""
        if self._matcher.is_stopped():
            return self._end_mask
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._words]

    def accept(self, token: int) -> None:
        """Go on by a token."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            logger.warning("a grammar has failed: %s", " ".join(self._matcher.get_error().split())[:200])


class Grammars:
    """The grammars of one model's answers."""

    def __init__(self, tokenizer: "Tokenizer", spec: "ModelSpec") -> None:
        self._tokenizer = tokenizer
        self._spec = spec
        self._compiled: OrderedDict[str, asyncio.Future[llguidance.LLMatcher]] = OrderedDict()
        self._vocabulary: llguidance.LLTokenizer | None = None
        bits = np.zeros(-(-spec.vocab_size // 32) * 32, np.uint8)
        bits[list(spec.eos_token_ids)] = 1
        self._end_mask = np.packbits(bits, bitorder="little").view(np.uint32)

    async def json_schema(self, schema: Mapping[str, Any]) -> GrammarConstraint:
        """An answer that is JSON of `schema`. Raises GrammarError."""
        text = _as_json(schema)
        _check_references(schema)
        return await self._constraint(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_JSON))

    async def lark(self, grammar: str) -> GrammarConstraint:
        """An answer of a grammar in Lark's notation. Raises GrammarError."""
        return await self._constraint(llguidance.LLMatcher.grammar_from_lark(grammar))

    async def _constraint(self, grammar: str) -> GrammarConstraint:
        if not self._spec.eos_token_ids:
            raise GrammarError(f"{self._spec.name} has no end token, so that no form could end: leave the form out")
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = asyncio.ensure_future(asyncio.to_thread(self._compile, grammar))
            self._compiled[grammar] = compiled
            if len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        # Shielded: several may wait for it, and one of them may go away.
        matcher = await asyncio.shield(compiled)
        if matcher.is_error():
            raise GrammarError(f"the form cannot be kept to: {' '.join(matcher.get_error().split())[:300]}")
        return GrammarConstraint(matcher.deep_copy(), self._spec.vocab_size, self._end_mask)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if self._vocabulary is None:
            self._vocabulary = llguidance.LLTokenizer(
                self._tokenizer.to_json(), n_vocab=self._spec.vocab_size, eos_token=list(self._spec.eos_token_ids)
            )
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if not matcher.is_error():
            first = matcher.deep_copy()
            first.compute_bitmask()
            if first.is_error():  # what llguidance says of it is the inside of its parser
                raise GrammarError(f"the form {_ENDLESS}")
        return matcher


def _check_references(schema: Mapping[str, Any]) -> None:
    """Raises GrammarError for a `$ref` that leads by nothing but others to itself: an answer would break off there."""
    nodes: list[Any] = [schema]
    ending: set[str] = set()  # so that a long chain is followed once, not from each of its links
    while nodes:
        node = nodes.pop()
        nodes.extend(node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ())
        followed: set[str] = set()
        while isinstance(node, Mapping) and isinstance(reference := node.get("$ref"), str):
            if reference in ending:
                break
            if reference in followed:
                raise GrammarError(f"the $ref {reference[:100]!r} {_ENDLESS}")
            followed.add(reference)
            node = _referred(schema, reference)
        ending |= followed


def _referred(schema: Mapping[str, Any], reference: str) -> Any:
    """What a `$ref` within `schema` stands for; None where it leads elsewhere."""
    node: Any = schema if reference.startswith("#") else None
    for part in urllib.parse.unquote(reference).split("/")[1:]:
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node


def _as_json(schema: Mapping[str, Any]) -> str:
    try:
        json.dumps(schema, ensure_ascii=False).encode()
        return json.dumps(schema)
    except (UnicodeEncodeError, RecursionError) as error:
        raise GrammarError("the schema is nested too deeply, or not of valid Unicode text: simplify it") from error
