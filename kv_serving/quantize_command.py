"""`jaxkv quantize`: a smaller copy of a checkpoint, and on a given text what that costs in perplexity.

The text is scored before anything is written, so that a text or a model that cannot be scored costs no copy.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kv_serving.byte_size import format_byte_size
from kv_serving.perplexity import Perplexity, TextError, perplexity_of
from kv_serving.progress import load_progress, score_progress


def quantize(
    source: Annotated[str, typer.Argument(metavar="SRC", help="An unquantized .gguf file or model directory.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="The file or directory to write.")],
    kind: Annotated[
        str, typer.Option(help="q8_0 or q4_0; for a .gguf file also q5_1, q5_0 and q4_1.", show_default=True)
    ] = "q8_0",
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Print the perplexity on this text before and after.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DST where it is a file that exists.")] = False,
    dtype: Annotated[str, typer.Option(help="Compute dtype of the perplexity.")] = "float32",
) -> None:
    """Write a copy of a model with its matrices quantized.

    The embedding and the output matrix are q8_0 in a .gguf file and as stored
    in a directory. Norms, biases, routers of experts and matrices whose rows
    are not whole blocks of 32 numbers stay as stored.
    """
    from models.quantized_copy import check_copy, quantize_checkpoint

    console = Console(stderr=True)
    check_copy(Path(source), Path(target), kind, overwrite=force)
    content = None if text is None else _read(text)
    before = None if content is None else _score(source, content, dtype, console)
    with load_progress(console, "writing") as progress:
        copy = quantize_checkpoint(Path(source), Path(target), kind, overwrite=force, progress=progress)
    print(
        f"wrote {target}: {copy.rounded} matrices in {kind}, {format_byte_size(copy.bytes_after)} of tensors, "
        f"{format_byte_size(copy.bytes_before)} before"
    )
    if before is not None and content is not None:
        print(difference_line(before, _score(target, content, dtype, console)))


def difference_line(before: Perplexity, after: Perplexity) -> str:
    """Both perplexities and their difference."""
    difference = after.value - before.value
    return (
        f"perplexity {before.value:.4f} before, {after.value:.4f} after: {difference:+.4f} "
        f"({100 * difference / before.value:+.2f}%), over {after.tokens} tokens in windows of {after.window}"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8 text (byte {error.start}): give a text file") from error


def _score(source: str, text: str, dtype: str, console: Console) -> Perplexity:
    with score_progress(console) as progress:
        return perplexity_of(source, text, dtype, progress)
