"""A model that is spelled letter by letter and an engine that recites: all that the command line needs."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple

from kv_common import JaxkvError, KvStorageLayoutV1, ModelSpec
from kv_control.buckets import StepShape
from kv_execution import EngineConfig, EnginePlan, EngineStats, SamplingParams
from models import GenerationDefaults

END = 0
SPEC = ModelSpec(
    name="parrot",
    architecture="llama",
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=64,
    vocab_size=0x110000,
    max_context=100,
    dtype="float32",
    num_parameters=1_234_567,
    parameter_bytes=3 << 20,
    eos_token_ids=(END,),
)
LAYOUT = KvStorageLayoutV1(num_layers=2, num_kv_heads=2, head_dim=8, num_pages=21)
SHAPES = (StepShape(1, 1, 256), StepShape(1, 1, 1024), StepShape(16, 1, 256))
PLAN = EnginePlan(SPEC, LAYOUT, 100, SHAPES, "cpu", "reference", "the only one")


class LetterTokenizer:
    """A token is a code point; token 0 is special."""

    vocab_size = 0x110000
    special_texts = None

    def encode(self, text: str, *, parse_special: bool = True, add_special: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return "".join(chr(token) for token in ids if token != END)

    def completes_text(self, token: int) -> bool:
        return True


class Template:
    """Roles and contents, one a line."""

    def render(self, messages: list[dict[str, str]], *, tools: object = None) -> str:
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def fake_model(*, template: bool = True, tokenizer: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        spec=SPEC,
        tokenizer=LetterTokenizer() if tokenizer else None,
        chat_template=Template() if template else None,
        generation=GenerationDefaults(eos_token_ids=(END,), temperature=0.5),
    )


class Output(NamedTuple):
    request_id: int
    token: int
    finish_reason: str | None


class TooLongError(JaxkvError):
    """The prompt is longer than the parrot listens."""


@dataclass
class FakeBatcher:
    """Recites `replies[i]` to the i-th request, a letter a step; the first step returns nothing, as when pipelined."""

    replies: list[str]
    submitted: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    adapters: list[str | None] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    running: dict[int, list[int]] = field(default_factory=dict)
    steps: int = 0
    on_step: object = None

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    def submit(self, token_ids: list[int], params: SamplingParams, *, adapter: str | None = None) -> int:
        if len(token_ids) >= SPEC.max_context:
            raise TooLongError(f"the prompt has {len(token_ids)} tokens, the context {SPEC.max_context}: shorten it")
        request_id = len(self.submitted)
        self.submitted.append((list(token_ids), params))
        self.adapters.append(adapter)
        self.running[request_id] = [*map(ord, self.replies[request_id]), END][: params.max_tokens]
        return request_id

    def step(self) -> list[Output]:
        self.steps += 1
        if callable(self.on_step):
            self.on_step(self)
        if self.steps == 1:
            return []
        return [self._next(request_id) for request_id in list(self.running)]

    def abort(self, request_id: int) -> bool:
        if self.running.pop(request_id, None) is None:
            return False
        self.aborted.append(request_id)
        return True

    def _next(self, request_id: int) -> Output:
        token = self.running[request_id].pop(0)
        if self.running[request_id]:
            return Output(request_id, token, None)
        del self.running[request_id]
        return Output(request_id, token, "stop" if token == END else "length")


@dataclass
class FakeEngine:
    """Hands out one batcher."""

    config: EngineConfig
    batcher_: FakeBatcher

    def batcher(self) -> FakeBatcher:
        return self.batcher_

    def describe(self) -> EnginePlan:
        return PLAN

    def stats(self) -> EngineStats:
        return EngineStats(
            pages_in_use=0,
            peak_pages_in_use=3,
            cached_pages=0,
            free_pages=17,
            running=0,
            waiting=0,
            steps=self.batcher_.steps,
            prefill_tokens=10,
            decode_tokens=20,
            preemptions=0,
            copied_pages=0,
            traces=2,
            shapes_used=2,
        )


def install(replies: list[str]) -> FakeBatcher:
    """Put the parrot in the place of every model that the command line opens."""
    from kv_serving import cli

    batcher = FakeBatcher(replies)
    cli.open_model = lambda source, dtype, console, tensor_parallel=1, max_context=None: fake_model()
    cli.start_engine = lambda model, config, console, **_: FakeEngine(config, batcher)
    return batcher
