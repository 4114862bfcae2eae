"""A GGUF file in other precisions, and what its tokens cost: for engines that are compared on one set of weights.

The forms hold exactly the values that the stored blocks stand for, so that a peer in float32 runs the same model. A
form is written once into a cache folder, under a name that holds the size and time of its source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from kv_common.errors import JaxkvError

Form = Literal["float32", "float16"]
FILE_TYPES = {"float32": 0, "float16": 1}


class GgufFormError(JaxkvError):
    """A GGUF file that cannot be read or rewritten here."""


class ModelCosts(NamedTuple):
    """What computing with a model takes: bytes that every step reads, parameters that every token meets.

    `output_parameters` are met by the rows that get logits alone. `kv_bytes` are those of one cached token,
    `attention_flops` those of one token attending to one other.
    """

    weight_bytes: int
    body_parameters: int
    output_parameters: int
    kv_bytes: int
    attention_flops: int


def in_form(path: Path, form: Form, folder: Path) -> Path:
    """`path` with every matrix in `form` and the rest in float32, from `folder` or written there.

    Raises GgufFormError without the gguf package.
    """
    import_gguf()
    import gguf

    stat = path.stat()
    target = folder / f"{path.stem}-{stat.st_size:x}-{stat.st_mtime_ns:x}.{form}.gguf"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(path)
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
    own = ("general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in own:
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1])
    writer.add_file_type(FILE_TYPES[form])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(form if values.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(target)
    return target


def costs_of(path: Path, kv_number_bytes: int) -> ModelCosts:
    """The costs of the model at `path`, as it is stored, with numbers of K/V that size.

    Raises GgufFormError without the gguf package.
    """
    import_gguf()
    import gguf

    reader = gguf.GGUFReader(path)
    prefix = reader.fields["general.architecture"].contents()
    layers, heads, kv_heads, width = (
        int(reader.fields[f"{prefix}.{name}"].contents())
        for name in ("block_count", "attention.head_count", "attention.head_count_kv", "embedding_length")
    )
    matrices = {tensor.name: tensor for tensor in reader.tensors if len(tensor.shape) > 1}
    body = [tensor for name, tensor in matrices.items() if name.startswith("blk.")]
    # A table that is both embedding and output is read once a step, one that is only the embedding hardly at all.
    output = matrices.get("output.weight", matrices["token_embd.weight"])
    head_dim = width // heads
    return ModelCosts(
        weight_bytes=sum(int(tensor.n_bytes) for tensor in (*body, output)),
        body_parameters=sum(int(tensor.n_elements) for tensor in body),
        output_parameters=int(output.n_elements),
        kv_bytes=2 * layers * kv_heads * head_dim * kv_number_bytes,
        attention_flops=4 * layers * heads * head_dim,
    )


def import_gguf() -> None:
    """Raises GgufFormError where the gguf package is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise GgufFormError("the gguf package is missing: pip install -e '.[test]'") from None
