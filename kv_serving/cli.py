"""The `jaxkv` command: options, and which parts a command puts together.

Contract: text goes to stdout, everything about it (progress, the closing line, errors) to stderr. Whatever a user can
get wrong is one line `jaxkv: ...` and exit status 2, never a traceback; Ctrl-C exits with 130; a closed pipe is quiet.
"""

import contextlib
import gc
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from kv_common import JaxkvError, __version__
from kv_serving import process_options, quantize_command
from kv_serving.batch_command import batch
from kv_serving.byte_size import parse_byte_size
from kv_serving.chat_repl import HELP, ChatRepl
from kv_serving.generation_run import run_jobs
from kv_serving.output_view import OrderedView, choose_view
from kv_serving.plan_report import plan_lines
from kv_serving.run_summary import summary_line, summary_object
from kv_serving.serve_command import serve
from kv_serving.session import (
    PromptOptionError,
    SamplingOptions,
    adapter_of_each,
    check_adapters,
    check_can_chat,
    config_for_jobs,
    encode_prompts,
    make_job,
    open_model,
    start_engine,
)

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A .gguf file, a model directory, or owner/name.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate for a prompt.")]
Temperature = Annotated[float | None, typer.Option(help="0 takes the most likely token. [default: the model's own]")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0 is off.")]
TopP = Annotated[float | None, typer.Option(help="Keep the fewest tokens that reach this probability; 1 is off.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens this fraction as likely as the likeliest; 0 is off.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")]
System = Annotated[str | None, typer.Option(help="A system message, before the first turn.")]
Dtype = Annotated[str, typer.Option(help="Compute dtype: float32, bfloat16 or float16.")]
Int8Activations = Annotated[
    bool,
    typer.Option(
        "--int8-activations",
        help="Round activations to 8 bits where weights of 4 bits or Q8_0 meet them: faster on some CPUs, less exact.",
    ),
]
MaxContext = Annotated[int | None, typer.Option(help="Longest prompt and answer. [default: the model's]")]
PoolBytes = Annotated[str, typer.Option(metavar="SIZE", help="Most memory for the K/V pages, as in 512MiB or 2GiB.")]
PageTokens = Annotated[int, typer.Option(help="Tokens in a page.")]
TensorParallel = Annotated[int, typer.Option("--tp", min=1, help="Devices to spread the model over.")]
CompilationCache = Annotated[
    bool,
    typer.Option(
        "--compilation-cache/--no-compilation-cache", help="Keep what is compiled in the user's cache folder."
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"jaxkv {__version__}")
        raise typer.Exit


@app.callback()
def _jaxkv(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """LLM inference in JAX on a paged K/V cache."""


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[list[str] | None, typer.Option(help="The prompt; several are generated in one batch.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="Use the model's chat template, or complete raw text. [default: chat if it has one]"
        ),
    ] = None,
    system: System = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIRECTORY", help="A PEFT LoRA adapter, for all prompts; or one for each of them, in order."
        ),
    ] = None,
    dtype: Dtype = "float32",
    int8_activations: Int8Activations = False,
    max_context: MaxContext = None,
    kv_pool_bytes: PoolBytes = "512MiB",
    tokens_per_page: PageTokens = 16,
    compilation_cache: CompilationCache = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when all is done.")] = False,
    tensor_parallel: TensorParallel = 1,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            envvar="JAXKV_COORDINATOR",
            help="Where process 0 is met, for a model spread over several processes: run the same command in each.",
        ),
    ] = None,
    num_processes: Annotated[int | None, typer.Option(envvar="JAXKV_NUM_PROCESSES", help="How many there are.")] = None,
    process_id: Annotated[
        int | None, typer.Option(envvar="JAXKV_PROCESS_ID", help="Which one this is, from 0.")
    ] = None,
    peer_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for other processes to come, or to be heard of.")
    ] = 60,
) -> None:
    """Generate text for one prompt, or for several in one batch."""
    if not prompt:
        raise PromptOptionError("there is no prompt: give --prompt TEXT, once for each prompt")
    pool_bytes = parse_byte_size(kv_pool_bytes)
    adapters = adapter_of_each(prompt, adapter or ())
    check_adapters(adapter or ())
    speaks = process_options.join(coordinator, num_processes, process_id, tensor_parallel, peer_timeout)
    progress = Console(stderr=True, quiet=not speaks)
    loaded = open_model(model, dtype, progress, tensor_parallel, max_context)
    params = SamplingOptions(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    ).resolve(loaded.generation)
    token_ids = encode_prompts(loaded, prompt, chat, system)
    jobs = [
        make_job(loaded, ids, params, stop or (), directory) for ids, directory in zip(token_ids, adapters, strict=True)
    ]
    ranks = [loaded.read_adapter(directory).rank for directory in dict.fromkeys(adapter or ())]
    config = config_for_jobs(
        *(jobs, loaded.spec, pool_bytes, tokens_per_page),
        adapter_ranks=ranks,
        int8_activations=int8_activations,
        compilation_cache=compilation_cache,
    )
    engine = start_engine(loaded, config, progress, warm_up=True, jobs=jobs)
    headings = [" ".join(text.split()) for text in prompt]
    view = OrderedView(io.StringIO(), None) if as_json else choose_view(Console(), sys.stdout, headings)
    with view:
        report = run_jobs(engine.batcher(), jobs, view)
    plan, stats = engine.describe(), engine.stats()
    if as_json:
        print(json.dumps(summary_object(prompt, jobs, report, plan, stats), ensure_ascii=False, indent=2))
    elif speaks:
        print(summary_line(report, plan, stats), file=sys.stderr)
    process_options.leave()


@app.command()
def chat(
    model: ModelArgument,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    system: System = None,
    dtype: Dtype = "float32",
    int8_activations: Int8Activations = False,
    max_context: MaxContext = None,
    kv_pool_bytes: PoolBytes = "512MiB",
    tokens_per_page: PageTokens = 16,
    compilation_cache: CompilationCache = True,
    tensor_parallel: TensorParallel = 1,
) -> None:
    """Talk with a model; /reset begins anew, /exit leaves."""
    from kv_execution import EngineConfig

    config = EngineConfig(
        kv_pool_bytes=parse_byte_size(kv_pool_bytes),
        tokens_per_page=tokens_per_page,
        max_requests=1,
        int8_activations=int8_activations,
        compilation_cache=compilation_cache,
    )
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (with it input() edits lines and recalls earlier ones; not every platform has it)
    progress = Console(stderr=True)
    loaded = open_model(model, dtype, progress, tensor_parallel, max_context)
    params = SamplingOptions(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    ).resolve(loaded.generation)
    check_can_chat(loaded)
    # Shapes compile when a conversation first reaches them: warming up all of the context would keep the user waiting.
    engine = start_engine(loaded, config, progress, warm_up=False)
    print(f"{loaded.spec.name}. {HELP}.", file=sys.stderr)
    ChatRepl(
        loaded, engine.batcher(), params, stops=stop or (), system=system, out=sys.stdout, read_line=_read_line
    ).run()


@app.command()
def embed(
    model: ModelArgument,
    prompt: Annotated[list[str] | None, typer.Option(help="The text; several are computed in one batch.")] = None,
    pooling: Annotated[str, typer.Option(help="mean, last or cls (the first token).")] = "mean",
    dtype: Dtype = "float32",
    int8_activations: Int8Activations = False,
    max_context: MaxContext = None,
    kv_pool_bytes: PoolBytes = "512MiB",
    tokens_per_page: PageTokens = 16,
    tensor_parallel: TensorParallel = 1,
) -> None:
    """Print a vector of length 1 for each text, as a line of JSON; of a classifier, its scores as well."""
    from kv_execution import EngineConfig

    pool_bytes = parse_byte_size(kv_pool_bytes)
    config = EngineConfig(
        kv_pool_bytes=pool_bytes,
        tokens_per_page=tokens_per_page,
        prefix_cache=False,
        int8_activations=int8_activations,
    )
    if not prompt:
        raise PromptOptionError("there is no prompt: give --prompt TEXT, once for each text")
    loaded = open_model(model, dtype, Console(stderr=True), tensor_parallel, max_context)
    token_ids = encode_prompts(loaded, prompt, False, None)
    engine = start_engine(loaded, config, Console(stderr=True), warm_up=False)
    vectors = engine.embed(token_ids, pooling=pooling).tolist()
    scores = engine.classify(token_ids).tolist() if loaded.spec.num_labels else [None] * len(prompt)
    for text, vector, own in zip(prompt, vectors, scores, strict=True):
        line = {"prompt": text, "embedding": vector, **({} if own is None else {"scores": own})}
        print(json.dumps(line, ensure_ascii=False))


@app.command()
def inspect(
    model: ModelArgument,
    dtype: Dtype = "float32",
    int8_activations: Int8Activations = False,
    max_context: MaxContext = None,
    kv_pool_bytes: PoolBytes = "512MiB",
    tokens_per_page: PageTokens = 16,
    tensor_parallel: TensorParallel = 1,
) -> None:
    """Print what fits in memory: parameters, pages and the tokens they hold, shapes, provider. Allocates no pool."""
    from kv_execution import EngineConfig, PagedEngine

    config = EngineConfig(
        kv_pool_bytes=parse_byte_size(kv_pool_bytes),
        tokens_per_page=tokens_per_page,
        int8_activations=int8_activations,
    )
    loaded = open_model(model, dtype, Console(stderr=True), tensor_parallel, max_context)
    for line in plan_lines(PagedEngine(loaded, config).describe()):
        print(line)


app.command()(serve)
app.command()(batch)
app.command()(quantize_command.quantize)


def _read_line() -> str:
    return input("> " if sys.stdin.isatty() else "")  # a piped conversation has no prompt in its output


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command (None: the process's own arguments) and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character shows `?`, not a traceback.
        sys.stdout.reconfigure(errors="replace")
    try:
        args = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
        return int(app(args=args, prog_name="jaxkv", standalone_mode=False) or 0)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except typer.TyperException as error:
        return _complain(error.format_message())
    except JaxkvError as error:
        process_options.fail(str(error))
        return _complain(str(error))
    except OSError as error:
        return _complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")


def _complain(message: str) -> int:
    print(f"jaxkv: {' '.join(message.split())}", file=sys.stderr)
    return 2


def main() -> None:
    """The console script, once everything is imported."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see console_script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Until the engine is ready, nearly all that is made stays; looking through it over and over takes a quarter of the
    # time of the imports.
    gc.disable()
    status = run()
    if status == INTERRUPTED or (status and process_options.in_group()):
        # The compiler's threads may still be at work, and tearing the interpreter down under them crashes it; and jax
        # would wait for peers that this process leaves behind.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
