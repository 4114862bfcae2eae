"""`jaxkv batch`: answers a file of requests."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kv_serving.byte_size import parse_byte_size
from kv_serving.serve_command import require_extra
from kv_serving.session import default_name, open_model, start_engine


def batch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A .gguf file, a model directory, or owner/name.")],
    source: Annotated[Path, typer.Argument(metavar="IN", help="Requests, a JSON object a line.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Results; those that are there are kept.")],
    served_name: Annotated[
        str | None, typer.Option(help="What requests call the model. [default: MODEL, without folders]")
    ] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 32,
    max_context: Annotated[int | None, typer.Option(help="Longest prompt and answer. [default: the model's]")] = None,
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
) -> None:
    """Answer a file of requests in OpenAI's batch format; run it again to go on where it was cut off."""
    require_extra()
    from kv_execution import EngineConfig
    from kv_serving.server.batch import run_batch
    from kv_serving.server.run import Loaded

    config = EngineConfig(
        kv_pool_bytes=parse_byte_size(kv_pool_bytes),
        tokens_per_page=tokens_per_page,
        max_requests=max_requests,
        max_step_tokens=max(256, max_requests),
        int8_activations=int8_activations,
    )
    console = Console(stderr=True)

    def load() -> Loaded:
        loaded = open_model(model, dtype, console, tensor_parallel, max_context)
        return Loaded(loaded, start_engine(loaded, config, console, warm_up=False))

    columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        report = run_batch(
            source,
            target,
            load,
            served_name or default_name(model),
            lambda done, of: bar.update(task, completed=done, total=of),
        )
    print(
        f"{report.requests} requests, {report.already_done} of them answered before; refused: {report.failed}",
        file=sys.stderr,
    )
