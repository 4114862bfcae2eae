"""`jaxkv serve`: its options, and what they set up."""

import importlib.util
import os
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from kv_common.errors import JaxkvError
from kv_serving.byte_size import parse_byte_size
from kv_serving.session import check_adapters, default_name, open_model, start_engine


class MissingExtraError(JaxkvError):
    """The libraries of the server are not installed."""


class OneProcessError(JaxkvError):
    """A server that is to be spread over several processes."""


class AdapterOptionError(JaxkvError):
    """An adapter that is not given as NAME=DIRECTORY, or whose name another one has."""


def require_extra() -> None:
    """Raises MissingExtraError where a library of the extra `serve` is not there."""
    _require("serve", "fastapi", "uvicorn", "prometheus_client", "llguidance")


def _require(extra: str, *libraries: str) -> None:
    for library in libraries:
        try:
            found = importlib.util.find_spec(library) is not None
        except ModuleNotFoundError:  # of a package that it would be in
            found = False
        if not found:
            raise MissingExtraError(f"{library} is not installed: pip install 'jaxkv[{extra}]'")


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A .gguf file, a model directory, or owner/name.")],
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIRECTORY", help="A PEFT LoRA adapter, which clients ask for as a model."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8000,
    served_name: Annotated[
        str | None, typer.Option(help="What clients call the model. [default: MODEL, without folders]")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="JAXKV_API_KEYS", help="A key that clients may use; may be repeated. [default: no keys]"),
    ] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 32,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are told to come back.")] = 256,
    max_step_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one step, prompts and answers.")] = 256,
    max_context: Annotated[int | None, typer.Option(help="Longest prompt and answer. [default: the model's]")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Longest prompt. [default: what fits]")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer. [default: what fits]")] = None,
    max_choices: Annotated[int, typer.Option(help="Answers of one request.")] = 128,
    max_concurrent: Annotated[int, typer.Option(help="Requests over HTTP that are answered at once.")] = 256,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Largest body.")] = "4MiB",
    deadline: Annotated[float | None, typer.Option(metavar="SECONDS", help="Longest time of a request.")] = None,
    drain: Annotated[float, typer.Option(metavar="SECONDS", help="How long the end may wait for requests.")] = 30,
    max_adapter_rank: Annotated[int, typer.Option(min=1, help="Largest rank of an adapter.")] = 16,
    pooling: Annotated[str, typer.Option(help="How embeddings are made: mean, last or cls.")] = "mean",
    dtype: Annotated[str, typer.Option(help="Compute dtype: float32, bfloat16 or float16.")] = "float32",
    int8_activations: Annotated[
        bool,
        typer.Option(
            "--int8-activations", help="Round activations to 8 bits where weights of 4 bits or Q8_0 meet them."
        ),
    ] = False,
    kv_pool_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Memory for the K/V pages.")] = "512MiB",
    tokens_per_page: Annotated[int, typer.Option(help="Tokens in a page.")] = 16,
    tensor_parallel: Annotated[int, typer.Option("--tp", min=1, help="Devices to spread the model over.")] = 1,
    warm_up: Annotated[bool, typer.Option("--warm-up/--no-warm-up", help="Compile all steps before the first.")] = True,
    compilation_cache: Annotated[
        bool,
        typer.Option(
            "--compilation-cache/--no-compilation-cache", help="Keep what is compiled in the user's cache folder."
        ),
    ] = True,
    replicas: Annotated[int, typer.Option(min=1, help="Engines behind the address; several run on Ray Serve.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(help="Scale up to so many. [default: as many as replicas]")
    ] = None,
    target_requests: Annotated[float, typer.Option(help="Requests of one replica that scaling aims at.")] = 16,
    up_after: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Too much load before scaling up.")] = 30,
    down_after: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Too little before scaling down.")] = 600,
    coordinator: Annotated[str | None, typer.Option(envvar="JAXKV_COORDINATOR", hidden=True)] = None,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Send OpenTelemetry traces there, by OTLP over HTTP.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model over HTTP, in OpenAI's API."""
    if coordinator is not None:
        raise OneProcessError(
            f"--coordinator {coordinator}: a server is one process, whose clients come to it alone; use --tp over the "
            "devices of this machine, or --replicas"
        )
    require_extra()
    from kv_execution import EngineConfig
    from kv_execution.embedding import check_pooling
    from kv_serving.server.api_keys import ApiKeys
    from kv_serving.server.limits import Limits
    from kv_serving.server.logs import log_to_stderr
    from kv_serving.server.run import Loaded, ServerSettings
    from kv_serving.server.run import serve as run_server
    from kv_serving.server.traces import endpoint_of

    check_pooling(pooling)
    if otlp_traces_endpoint is not None:
        otlp_traces_endpoint = endpoint_of(otlp_traces_endpoint)
        _require("serve,otel", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    name = served_name or default_name(model)
    adapters = _adapters(name, adapter or ())
    check_adapters(adapters.values())
    config = EngineConfig(
        max_adapters=len(adapters),
        max_adapter_rank=max_adapter_rank,
        kv_pool_bytes=parse_byte_size(kv_pool_bytes),
        tokens_per_page=tokens_per_page,
        max_requests=max_requests,
        max_waiting=max_waiting,
        max_step_tokens=max(max_step_tokens, max_requests),
        int8_activations=int8_activations,
        compilation_cache=compilation_cache,
    )
    settings = ServerSettings(
        name=name,
        host=host,
        port=port,
        api_keys=ApiKeys(api_key or ()),
        limits=Limits(
            max_body_bytes=parse_byte_size(max_body),
            max_prompt_tokens=max_prompt_tokens,
            max_tokens=max_tokens,
            max_choices=max_choices,
            max_concurrent=max_concurrent,
            deadline_s=deadline,
        ),
        drain_s=drain,
        pooling=pooling,
        otlp_traces_endpoint=otlp_traces_endpoint,
    )

    def load() -> Loaded:
        console = Console(stderr=True)
        loaded = open_model(model, dtype, console, tensor_parallel, max_context)
        engine = start_engine(loaded, config, console, warm_up=warm_up, constrained=True)
        for adapter_name, directory in adapters.items():
            engine.adapters.load(adapter_name, directory)
        return Loaded(loaded, engine)

    if replicas > 1 or max_replicas is not None:
        _require("serve,ray", "ray")
        from kv_serving.replicas.app import Scaling, run

        scaling = Scaling(
            replicas=replicas,
            max_replicas=max_replicas or replicas,
            target_requests=target_requests,
            up_after_s=up_after,
            down_after_s=down_after,
        )
        run(settings, load, scaling, log_level, tensor_parallel)
        return
    log_to_stderr(log_level)
    if not run_server(settings, load):
        # Tearing the interpreter down under a compiler that is at work would crash it.
        os._exit(0)


def _adapters(served_name: str, options: Sequence[str]) -> dict[str, str]:
    """Directories of adapters by name. Raises AdapterOptionError."""
    adapters: dict[str, str] = {}
    for name, directory in map(_named, options):
        if name == served_name or name in adapters:
            taken = "the model" if name == served_name else "another adapter"
            raise AdapterOptionError(f"--adapter {name}={directory}: {name!r} names {taken}; choose another name")
        adapters[name] = directory
    return adapters


def _named(option: str) -> tuple[str, str]:
    name, equals, directory = option.partition("=")
    if not (name and equals and directory):
        raise AdapterOptionError(f"--adapter {option!r} has no name: give NAME=DIRECTORY")
    return name, directory
