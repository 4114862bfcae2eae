"""Grammars that hold an answer to a form: compiled beside the event loop, kept, and copied for each answer.

Contract: an answer that ends by itself is of its form; one that is cut short by max_tokens may be the beginning of one.
Where the form is complete, the model's end tokens are all that may come. `oneOf` counts as `anyOf` where its parts
cannot be told apart. Compilation is limited by llguidance's own fuel, and nobody waits for more than COMPILE_S.
"""

import asyncio
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from kv_common.errors import JaxkvError
from kv_serving.server.schema_check import endless_part
from kv_serving.server.tool_formats import ToolFormat

if TYPE_CHECKING:
    from kv_common.model_spec import ModelSpec
    from models import Tokenizer

logger = logging.getLogger(__name__)

# A model that has nothing to say might otherwise write spaces until its tokens run out.
_JSON: Any = {"whitespace_pattern": r"[ \n\r\t]{0,32}", "coerce_one_of": True}
_ENDLESS = "refers to itself without end, so that there is no answer: change it"
_TOO_DEEP = "the schema is nested too deeply, or not of valid Unicode text: simplify it"
MOST_KEPT = 128
"""Grammars that stay compiled."""

COMPILE_S = 10.0
COMPILERS = 2
"""Grammars that are compiled at once; the rest wait their turn."""


class GrammarError(JaxkvError):
    """A form that no answer can be held to."""


class GrammarConstraint:
    """One answer on its way through a grammar; see TokenConstraint."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, end_mask: NDArray[np.uint32]) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // 32)
        self._end_mask = end_mask
        self.failure: str | None = None
        """Why the answer has left its form, which only the limits of the grammar's parser can bring about."""

    def allowed(self) -> NDArray[np.uint32]:
        """The tokens that the grammar allows next."""
        if self._matcher.is_stopped():
            return self._end_mask
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._words]
        self._note_failure()
        return self._end_mask if self.failure else mask

    def accept(self, token: int) -> None:
        """Go on by a token."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._note_failure()

    def _note_failure(self) -> None:
        if self.failure is None and self._matcher.is_error():
            self.failure = _first_line(self._matcher.get_error())


class Grammars:
    """The grammars of one model's answers."""

    def __init__(self, tokenizer: "Tokenizer", spec: "ModelSpec") -> None:
        self._spec = spec
        self._compiled: OrderedDict[str, asyncio.Future[llguidance.LLMatcher]] = OrderedDict()
        self._compilers = ThreadPoolExecutor(COMPILERS, "grammars")
        try:
            # Now, since Python stands still meanwhile.
            self._vocabulary: llguidance.LLTokenizer | None = llguidance.LLTokenizer(
                tokenizer.to_json(), n_vocab=spec.vocab_size, eos_token=list(spec.eos_token_ids)
            )
        except ValueError as error:
            self._vocabulary = None
            logger.warning("answers cannot be held to a form: %s", _first_line(str(error)))
        bits = np.zeros(-(-spec.vocab_size // 32) * 32, np.uint8)
        bits[list(spec.eos_token_ids)] = 1
        self._end_mask = np.packbits(bits, bitorder="little").view(np.uint32)

    async def json_schema(self, schema: Mapping[str, Any]) -> GrammarConstraint:
        """An answer that is JSON of `schema`. Raises GrammarError."""
        text = _as_json(schema)
        _check_finite(schema)
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_JSON)
        except ValueError as error:
            raise GrammarError(_TOO_DEEP) from error
        return await self._constraint(grammar)

    async def calls(
        self, notation: ToolFormat, tools: Sequence[Mapping[str, Any]], opening_token: int | None, *, several: bool
    ) -> GrammarConstraint:
        """An answer that is calls of tools, see `ToolFormat.form`. Raises GrammarError."""
        try:
            start, call = notation.form(tools, opening_token, several=several)
        except RecursionError as error:
            raise GrammarError(_TOO_DEEP) from error
        text = _as_json({**call, "x-guidance": _JSON})
        _check_finite(call)
        return await self._constraint(llguidance.LLMatcher.grammar_from_lark(f"start: {start}\ncall: %json {text}\n"))

    async def _constraint(self, grammar: str) -> GrammarConstraint:
        if not self._spec.eos_token_ids:
            raise GrammarError(f"{self._spec.name} has no end token, so that no form could end: leave the form out")
        if self._vocabulary is None:
            raise GrammarError(f"the tokenizer of {self._spec.name} knows no forms: leave the form out")
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = asyncio.get_running_loop().run_in_executor(
                self._compilers, self._compile, self._vocabulary, grammar
            )
            self._compiled[grammar] = compiled
            if len(self._compiled) > MOST_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        try:
            # Shielded: several may wait for it, and one of them may go away.
            matcher = await asyncio.wait_for(asyncio.shield(compiled), COMPILE_S)
        except TimeoutError as error:
            raise GrammarError(f"the form takes more than {COMPILE_S:g} s to compile: simplify it") from error
        if matcher.is_error():
            raise GrammarError(f"the form cannot be kept to: {_first_line(matcher.get_error())}")
        return GrammarConstraint(matcher.deep_copy(), self._spec.vocab_size, self._end_mask)

    def _compile(self, vocabulary: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        if not matcher.is_error():
            first = matcher.deep_copy()
            first.compute_bitmask()
            if first.is_error():  # what llguidance says of it is the inside of its parser
                raise GrammarError(f"the form {_ENDLESS}")
        return matcher


def _check_finite(schema: Mapping[str, Any]) -> None:
    """Raises GrammarError for a schema that no answer can end: it would break off where that shows."""
    endless = endless_part(schema)
    if endless is not None:
        raise GrammarError(f"{endless} {_ENDLESS}")


def _as_json(schema: Mapping[str, Any]) -> str:
    try:
        json.dumps(schema, ensure_ascii=False).encode()
        return json.dumps(schema)
    except (UnicodeEncodeError, RecursionError) as error:
        raise GrammarError(_TOO_DEEP) from error


def _first_line(text: str) -> str:
    """What llguidance says, without where in its own grammar, and without that grammar."""
    line = next(iter(text.strip().splitlines()), "")
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", line)[:300]
