"""From the body of a request to answers on their way: prompts, limits, sampling, and the groups for the engine.

Contract: what is wrong with a request is raised here as an ApiError or a JaxkvError, before the engine hears of it.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kv_serving.server.answer import Answer
from kv_serving.server.chat_protocol import ChatMessage, ChatRequest
from kv_serving.server.completion_protocol import CompletionRequest
from kv_serving.server.context import salt_of
from kv_serving.server.embeddings import Embeddings
from kv_serving.server.engine_loop import EngineLoop
from kv_serving.server.errors import ApiError
from kv_serving.server.form_fields import JsonObjectFormat, JsonSchemaFormat, NamedTool
from kv_serving.server.grammars import GrammarConstraint, Grammars
from kv_serving.server.limits import Concurrency, Limits
from kv_serving.server.request_group import EventChannel, RequestGroup
from kv_serving.server.responses import Body
from kv_serving.server.sampling_fields import SamplingFields
from kv_serving.server.server_metrics import ServerMetrics
from kv_serving.server.token_text import TokenTexts
from kv_serving.server.tool_formats import format_of_template
from kv_serving.session import encode_chat, tokenizer_of
from kv_serving.stop_strings import StopStrings
from kv_serving.text_assembly import TextAssembly

if TYPE_CHECKING:
    from kv_execution import EnginePlan, SamplingParams
    from models import LoadedModel

DEFAULT_COMPLETION_TOKENS = 16
LONG_TEXT = 4096
"""Characters from which a text is encoded beside the event loop."""


class Prompt(NamedTuple):
    """Token ids, what to sample for each answer to them, and what of the prompt the answers tell: its text, and the
    scores of its tokens (see RequestGroup).
    """

    token_ids: Sequence[int]
    params: Sequence["SamplingParams"]
    opening: str = ""
    prompt_logprobs: int | None = None
    generates: bool = True


class CachedPrompt(NamedTuple):
    """Token ids, and what else decides which cached pages are theirs."""

    token_ids: Sequence[int]
    cache_salt: str
    adapter: str | None


class Service:
    """Answers requests with one model."""

    def __init__(
        self,
        name: str,
        model: "LoadedModel",
        plan: "EnginePlan",
        engine: EngineLoop,
        limits: Limits,
        metrics: ServerMetrics,
        adapters: Sequence[str] = (),
        pooling: str = "mean",
    ) -> None:
        """`name` is what requests call the model; `adapters` are the names of loaded ones, each a model to ask for.

        `pooling` is how /v1/embeddings makes a vector of a prompt.
        """
        self.name = name
        self.names = (name, *adapters)
        self.model = model
        self.max_context = plan.max_context
        self.limits = limits
        self.tokenizer = tokenizer_of(model)
        self.texts = TokenTexts(self.tokenizer)
        self.grammars = Grammars(self.tokenizer, model.spec)
        self.tool_format = None if model.chat_template is None else format_of_template(model.chat_template.source)
        self._calls_are_special = self._is_special(self.tool_format.opening if self.tool_format else "")
        self._most_tokens = min(plan.max_context, plan.layout.usable_tokens + 1)
        self._engine = engine
        self._metrics = metrics
        self.concurrency = Concurrency(limits.max_concurrent)
        self.embeddings = Embeddings(self, engine, metrics, pooling)

    async def complete(self, request: CompletionRequest, tenant: str) -> Answer:
        """The answers to a completion; choice n * i + j is number j to prompt i."""
        request.check()
        self._check(request, len(request.prompts))
        prompts = []
        for prompt in request.prompts:
            token_ids = await self.encode(prompt) if isinstance(prompt, str) else prompt
            asked = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
            params = request.sampling_params(
                self.model.generation,
                max_tokens=max(1, asked),
                logprobs=request.logprobs is not None,
                top_logprobs=request.logprobs or 0,
            )
            opening, scored = "", None
            if request.echo:
                opening = prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special=False)
                scored = request.logprobs if request.logprobs is not None or asked else 0
            prompts.append(Prompt(token_ids, params, opening, scored, generates=asked > 0))
        return self._answer(request, prompts, tenant)

    async def chat(self, request: ChatRequest, tenant: str) -> Answer:
        """The answers to a conversation."""
        request.check()
        self._check(request, 1)
        token_ids = await self._encode_chat(request)
        asked = request.max_completion_tokens or request.max_tokens
        if asked is None:
            most = self._most_tokens if self.limits.max_tokens is None else self.limits.max_tokens
            asked = max(1, min(most, self._most_tokens - len(token_ids)))
        params = request.sampling_params(
            self.model.generation,
            max_tokens=asked,
            logprobs=bool(request.logprobs),
            top_logprobs=request.top_logprobs or 0,
        )
        constraints = [await self._constraint(request) for _ in params]
        return self._answer(
            request,
            [Prompt(token_ids, params)],
            tenant,
            constraints,
            raw=bool(request.tools_in_use) and self._calls_are_special,
        )

    async def first_prompt(self, path: str, body: bytes, tenant: str) -> CachedPrompt:
        """The first prompt of a request for `path`, as the prefix cache has it. Raises ValueError for a body of
        another form, and what the request itself would raise.
        """
        request: CompletionRequest | ChatRequest
        if path.endswith("/chat/completions"):
            request = ChatRequest.model_validate_json(body)
            token_ids: Sequence[int] = await self._encode_chat(request)
        else:
            request = CompletionRequest.model_validate_json(body)
            request.check()
            first = request.prompts[0]
            token_ids = await self.encode(first) if isinstance(first, str) else first
        return CachedPrompt(token_ids, salt_of(tenant, request.cache_salt), self.adapter_of(request.model))

    async def _encode_chat(self, request: ChatRequest) -> list[int]:
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools_in_use] or None
        if tools and self.tool_format is None:
            raise ApiError(400, "the chat template of this model knows no tools: leave them out", param="tools")
        return await self.encode_messages(request.messages, tools)

    async def encode_messages(self, given: Sequence[ChatMessage], tools: Sequence[Body] | None = None) -> list[int]:
        """Token ids of a conversation. Raises ApiError, ChatTemplateError."""
        messages = [message.for_template() for message in given]
        if self.model.chat_template is not None and "developer" not in self.model.chat_template.source:
            for message in messages:  # a new name for system messages, which templates may not know
                message["role"] = "system" if message["role"] == "developer" else message["role"]
        if sum(len(message["content"]) for message in messages) > LONG_TEXT:
            return await asyncio.to_thread(encode_chat, self.model, messages, tools)
        return encode_chat(self.model, messages, tools)

    async def _constraint(self, request: ChatRequest) -> GrammarConstraint | None:
        """What holds an answer to the form that is asked for."""
        if request.tools_to_call and self.tool_format is not None:
            tools = [tool.function.model_dump(exclude_none=True) for tool in request.tools_to_call]
            opening = self.tokenizer.token_id(self.tool_format.opening) if self.tool_format.opening else None
            several = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedTool)
            return await self.grammars.calls(self.tool_format, tools, opening, several=several)
        form = request.response_format
        if isinstance(form, JsonObjectFormat):
            return await self.grammars.json_schema({"type": "object"})
        if isinstance(form, JsonSchemaFormat):
            return await self.grammars.json_schema(form.json_schema.schema_ or {})
        return None

    async def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of `text`. Raises TokenizerError."""
        if len(text) > LONG_TEXT:
            return await asyncio.to_thread(self.tokenizer.encode, text, add_special=add_special)
        return self.tokenizer.encode(text, add_special=add_special)

    def check_model(self, asked: str | None) -> None:
        """Raises ApiError for a model that is not served."""
        if asked is not None and asked not in self.names:
            message = f"there is no model {asked!r}: ask for {' or '.join(self.names)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def adapter_of(self, asked: str | None) -> str | None:
        """The name of the adapter that a request for the model `asked` runs with."""
        return None if asked == self.name else asked

    def _is_special(self, text: str) -> bool:
        """Whether `text` is a token that decoding leaves out."""
        token = self.tokenizer.token_id(text) if text else None
        return token is not None and not self.tokenizer.decode([token])

    def _check(self, request: SamplingFields, prompts: int) -> None:
        self.check_model(request.model)
        self.limits.check_choices(prompts * request.choices)

    def _answer(
        self,
        request: SamplingFields,
        prompts: Sequence[Prompt],
        tenant: str,
        constraints: Sequence[GrammarConstraint | None] = (),
        *,
        raw: bool = False,
    ) -> Answer:
        """`raw`: special tokens are part of the text, for whoever reads it for calls."""
        from models import StreamDecoder

        channel = EventChannel()
        groups: list[RequestGroup] = []
        assemblies: list[TextAssembly] = []
        for prompt in prompts:
            self.limits.check_prompt(len(prompt.token_ids))
            self.limits.check_max_tokens(prompt.params[0].max_tokens)
            first = len(assemblies)
            for _ in prompt.params:
                assemblies.append(
                    TextAssembly(
                        StreamDecoder(self.tokenizer, skip_special=not raw),
                        StopStrings(request.stops),
                        request.min_tokens or 0,
                    )
                )
            groups.append(
                RequestGroup(
                    prompt.token_ids,
                    dict(enumerate(prompt.params, first)),
                    channel,
                    priority=request.priority or 0,
                    adapter=self.adapter_of(request.model),
                    cache_salt=salt_of(tenant, request.cache_salt),
                    deadline_s=self.limits.deadline_of(request.deadline_s),
                    opening=prompt.opening,
                    prompt_logprobs=prompt.prompt_logprobs,
                    generates=prompt.generates,
                    constraints={index: each for index, each in enumerate(constraints) if each is not None},
                )
            )
        return Answer(
            self._engine, self._metrics, channel, groups, assemblies, self.concurrency, request.model or self.name
        )
