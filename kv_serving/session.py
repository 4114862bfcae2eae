"""From a model's name and a user's options to an engine that is ready to generate: what every command does first.

Contract: jax and the packages over it are imported inside these functions, so that `--help`, `--version` and a mistyped
option answer at once. Everything a user can get wrong raises a JaxkvError.
"""

import gc
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kv_common.errors import JaxkvError
from kv_common.layout import ELEMENT_BYTES
from kv_common.model_spec import ModelSpec
from kv_serving.generation_run import Job
from kv_serving.memory import release_unused_memory
from kv_serving.progress import compile_progress, load_progress
from kv_serving.stop_strings import StopStrings
from kv_serving.text_assembly import TextAssembly

if TYPE_CHECKING:
    from kv_execution import EngineConfig, PagedEngine, SamplingParams
    from models import GenerationDefaults, LoadedModel, Tokenizer

MAX_BATCH = 32
MAX_STEP_TOKENS = 256

Message = Mapping[str, str]


class PromptOptionError(JaxkvError):
    """Options that ask for a prompt that this model, or any model, cannot be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """What the user said about sampling; None leaves it to the model's own defaults."""

    max_tokens: int
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None

    def resolve(self, defaults: "GenerationDefaults") -> "SamplingParams":
        """The parameters to sample with. Raises SamplingParamsError for a number out of its range."""
        from kv_execution import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            repetition_penalty=defaults.repetition_penalty,
            seed=self.seed,
        )


def open_model(
    source: str, dtype: str, console: Console, tensor_parallel: int = 1, max_context: int | None = None
) -> "LoadedModel":
    """Load `source` over `tensor_parallel` devices, for sequences of `max_context` tokens (None: the model's own), with
    a progress bar. Raises what `load_model` raises.
    """
    from kv_kernels.selection import current_platform
    from models import load_model

    current_platform()  # refuses a platform that is not there before anything is read
    with load_progress(console) as progress:
        model = load_model(
            source, dtype=dtype, max_context=max_context, tensor_parallel=tensor_parallel, progress=progress
        )
    release_unused_memory()
    return model


def default_name(source: str) -> str:
    """What clients call the model `source`: its file's or directory's own name, or the id at the hub."""
    return (os.path.basename(os.path.abspath(source)) if os.path.exists(source) else "") or source


def tokenizer_of(model: "LoadedModel") -> "Tokenizer":
    """The model's tokenizer. Raises PromptOptionError where it came without one."""
    if model.tokenizer is None:
        raise PromptOptionError(f"{model.spec.name} came without a tokenizer: put tokenizer.json beside its weights")
    return model.tokenizer


def check_can_chat(model: "LoadedModel") -> None:
    """Raises PromptOptionError where the model has no chat template or no tokenizer."""
    if model.chat_template is None:
        raise PromptOptionError(f"{model.spec.name} has no chat template: complete raw text with generate --raw")
    tokenizer_of(model)


def encode_chat(
    model: "LoadedModel", messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
) -> list[int]:
    """Token ids of a conversation in the model's chat template, up to where its answer begins; `tools` are those that
    the answer may call. See `models.encode_messages` for what keeps messages from being more than text.

    Raises PromptOptionError where the model has no template, ChatTemplateError where it refuses the messages.
    """
    from models import encode_messages

    check_can_chat(model)
    assert model.chat_template is not None
    return encode_messages(model.chat_template, tokenizer_of(model), messages, tools)


def encode_prompts(
    model: "LoadedModel", prompts: Sequence[str], chat: bool | None, system: str | None
) -> list[list[int]]:
    """Token ids of each prompt: as the user's turn of a chat or raw; `chat` None: a chat where there is a template.

    Raises PromptOptionError for an empty prompt or a system message without a chat, and what `encode_chat` raises.
    """
    if not all(prompts):
        raise PromptOptionError("the prompt is empty: give --prompt at least one character")
    if chat is None:
        chat = model.chat_template is not None
    if not chat:
        if system is not None:
            raise PromptOptionError("a raw prompt has no system message: leave out --system, or use --chat")
        return [tokenizer_of(model).encode(prompt) for prompt in prompts]
    return [encode_chat(model, opening_messages(system, prompt)) for prompt in prompts]


def opening_messages(system: str | None, prompt: str) -> list[Message]:
    """The first messages of a conversation."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": prompt}]


def make_job(
    model: "LoadedModel",
    token_ids: Sequence[int],
    params: "SamplingParams",
    stops: Sequence[str],
    adapter: str | None = None,
) -> Job:
    """One prompt, ready to run. Raises StopStringError for an empty stop string."""
    from models import StreamDecoder

    return Job(token_ids, params, TextAssembly(StreamDecoder(tokenizer_of(model)), StopStrings(stops)), adapter)


def check_adapters(directories: Iterable[str]) -> None:
    """Raises AdapterError for a directory without an adapter, before the model is loaded for it."""
    if directories := list(directories):
        from models.lora import check_files

        for directory in directories:
            check_files(directory)


def adapter_of_each(prompts: Sequence[str], adapters: Sequence[str]) -> Sequence[str | None]:
    """The adapter's directory of each prompt: none, one for all, or one each. Raises PromptOptionError."""
    if len(adapters) < 2:
        return [adapters[0] if adapters else None] * len(prompts)
    if len(adapters) != len(prompts):
        raise PromptOptionError(
            f"{len(adapters)} adapters for {len(prompts)} prompts: give --adapter once for all, or once for each prompt"
        )
    return adapters


def config_for_jobs(
    jobs: Sequence[Job],
    spec: ModelSpec,
    kv_pool_bytes: int,
    tokens_per_page: int,
    *,
    adapter_ranks: Sequence[int] = (),
    int8_activations: bool = False,
    compilation_cache: bool,
) -> "EngineConfig":
    """An engine for `jobs`, with pools of at most `kv_pool_bytes` and room for adapters of these ranks. Raises
    EngineConfigError.

    Every size is in a few coarse steps: the sizes of an engine are in all that it compiles, and what was compiled for
    one prompt should serve the next.
    """
    from kv_execution import EngineConfig

    tokens = sum(min(len(job.token_ids) + job.params.max_tokens, spec.max_context) for job in jobs)
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * ELEMENT_BYTES[spec.dtype]
    # Pages that are not full, and the one of padding, come on top.
    needed = (tokens + (len(jobs) + 1) * tokens_per_page) * token_bytes
    smaller = (kv_pool_bytes // 16, kv_pool_bytes // 4)
    return EngineConfig(
        kv_pool_bytes=next((size for size in smaller if size >= needed), kv_pool_bytes),
        tokens_per_page=tokens_per_page,
        max_requests=min(MAX_BATCH, 1 << (len(jobs) - 1).bit_length()),
        max_step_tokens=MAX_STEP_TOKENS,
        # One prompt has nobody to share with, and a cache of prefixes begins with reading all weights for its name.
        prefix_cache=len(jobs) > 1,
        max_adapters=len(adapter_ranks),
        max_adapter_rank=max(adapter_ranks, default=1),
        int8_activations=int8_activations,
        compilation_cache=compilation_cache,
    )


def start_engine(
    model: "LoadedModel",
    config: "EngineConfig",
    console: Console,
    *,
    warm_up: bool,
    jobs: Sequence[Job] | None = None,
    constrained: bool = False,
) -> "PagedEngine":
    """An engine with its pools allocated and, with `warm_up`, every reachable shape compiled behind a progress bar, or
    what `jobs` alone will reach; `constrained`: for answers with a form, too.

    Raises EngineConfigError, LayoutError or ProviderError; for jobs what `Batcher.submit` raises.
    """
    from kv_execution import PagedEngine

    engine = PagedEngine(model, config)
    plan = engine.init_paged_runtime()
    for directory in dict.fromkeys(job.adapter for job in jobs or () if job.adapter is not None):
        engine.adapters.load(directory, directory)
    if warm_up:
        params = None if jobs is None else [job.params for job in jobs]
        shapes = plan.shapes
        if jobs is not None and params is not None:
            adapters = [job.adapter for job in jobs]
            shapes = engine.shapes_needed([job.token_ids for job in jobs], params, adapters=adapters)
        with compile_progress(console, len(shapes)) as progress:
            engine.warmup_paged(progress, shapes=shapes, params=params, constrained=constrained)
    release_unused_memory()
    # What there is by now stays, so it need not be looked through for garbage ever again.
    gc.freeze()
    gc.enable()
    return engine
