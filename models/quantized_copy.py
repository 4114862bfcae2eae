"""`quantize_checkpoint`: a smaller copy of a checkpoint, its matrices rounded to blocks of 32.

The copy is what its source is, since what only one format can say (tokenizer, configuration) then needs no translation:
a GGUF file of ggml's kinds, or a Hugging Face directory in the compressed-tensors format. Tensors are read, rounded and
written one at a time, beside the target, which appears when all is written.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kv_kernels.weights import BLOCK_SIZE, QuantKind
from models.assembly import LoadProgress, ProgressCallback
from models.block_quantizer import KINDS, RoundedRows, pack_rows, round_rows
from models.checkpoint import CheckpointError, is_quantized
from models.config import UnsupportedModelError
from models.config_fields import ConfigFields, read_json
from models.families import family_of, gguf_format_of
from models.gguf_blocks import join_blocks
from models.gguf_loader import GgufCheckpoint
from models.packed_weights import pack_words
from models.safetensors_loader import SafetensorsCheckpoint
from models.tensor_files import Planned, TensorSpec, storage_bytes, write_gguf, write_safetensors

DIRECTORY_KINDS: tuple[QuantKind, ...] = ("q8_0", "q4_0")
"""Kinds that are scale * (quant - constant), which is what the directory's format knows."""

_END_KIND: QuantKind = "q8_0"
_ENDS, _ROUTER = ("embedding.weight", "output.weight"), "layers.mlp.router.weight"
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model")


class QuantizedCopy(NamedTuple):
    """Bytes of all tensors before and after, and how many matrices were rounded."""

    bytes_before: int
    bytes_after: int
    rounded: int


def quantize_checkpoint(
    source: Path, target: Path, kind: str, *, overwrite: bool = False, progress: ProgressCallback | None = None
) -> QuantizedCopy:
    """Write a copy of `source`, a GGUF file or a directory that is not quantized, whose matrices are of `kind`.

    Experts' routers keep their precision, and so do matrices whose rows are not whole blocks. The embedding and the
    output matrix are q8_0 in a GGUF file; in a directory they keep theirs, as other programs expect. A directory is
    never replaced.

    Raises:
        CheckpointError: the source cannot be read or is quantized already, or the target exists.
        UnsupportedModelError: an unknown kind, or one that the source's format has not.
    """
    stored = check_copy(source, target, kind, overwrite=overwrite)
    copy = _copy_directory if source.is_dir() else _copy_gguf
    with _beside(target) as unfinished:
        return copy(source, unfinished, stored, progress)


def check_copy(source: Path, target: Path, kind: str, *, overwrite: bool) -> QuantKind:
    """The kind, where `quantize_checkpoint` would begin to write. Raises what it raises."""
    if not source.exists():
        raise CheckpointError(f"{source}: no such file or directory: give a .gguf file or a model directory")
    is_directory = source.is_dir()
    known = DIRECTORY_KINDS if is_directory else KINDS
    stored = next((each for each in known if each == kind), None)
    if stored is None:
        what = "directory" if is_directory else "GGUF file"
        raise UnsupportedModelError(f"{kind!r} is no kind that a {what} can be written in: use {', '.join(known)}")
    if is_directory == (target.suffix == ".gguf"):
        made = "a directory" if is_directory else "a .gguf file"
        raise CheckpointError(f"{target}: the copy of {source} is {made}, as its source is: give a name for one")
    if target.exists():
        replaceable = target.is_file() and not is_directory and not target.samefile(source)
        if not (overwrite and replaceable):
            remedy = ", or --force to replace it" if replaceable else ""
            if overwrite and target.is_dir():
                remedy = "; no directory is replaced"
            raise CheckpointError(f"{target} exists: give a target that does not{remedy}")
    return stored


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A name that becomes `target` at the end, and that is gone after an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.unfinished")
    try:
        yield unfinished
        os.replace(unfinished, target)
    finally:
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        unfinished.unlink(missing_ok=True)


def _copy_gguf(source: Path, target: Path, kind: QuantKind, progress: ProgressCallback | None) -> QuantizedCopy:
    checkpoint = GgufCheckpoint(source)
    file = checkpoint.file
    architecture = ConfigFields(file.metadata, source.name).take("general.architecture", str)
    roles = _Roles(gguf_format_of(architecture, source.name).names_in(checkpoint.names))
    planned = []
    for name, tensor in file.tensors.items():
        if is_quantized(checkpoint.storage(name)):
            raise CheckpointError(f"{source}: {name} is {tensor.storage.name} already: give the model unquantized")
        stored = _END_KIND if roles.is_end(name) else kind
        if not roles.is_product(name, tensor.shape):
            spec = TensorSpec(name, tensor.storage.name, tensor.shape, tensor.data.nbytes)
            planned.append(Planned((spec,), functools.partial(_of_one, tensor.data)))
            continue
        spec = TensorSpec(name, stored.upper(), tensor.shape, storage_bytes(stored.upper(), tensor.shape))
        planned.append(Planned((spec,), functools.partial(_blocks, checkpoint, name, stored)))
    before = sum(tensor.data.nbytes for tensor in file.tensors.values())
    write_gguf(target, file, planned, _progress_over(planned, progress))
    return _summary(planned, before)


def _copy_directory(source: Path, target: Path, kind: QuantKind, progress: ProgressCallback | None) -> QuantizedCopy:
    config = read_json(source / "config.json")
    if config.get("quantization_config"):
        raise CheckpointError(f"{source} is quantized already: give the model unquantized")
    family = family_of(ConfigFields(config, "config.json").take("model_type", str), "config.json")
    checkpoint = SafetensorsCheckpoint(source)
    roles = _Roles(family.hf_names_in(checkpoint.names))
    planned, ignored, before = [], ["lm_head"], 0
    for name in sorted(checkpoint.names):
        shape, type_name = checkpoint.shape(name), checkpoint.stored_type(name)
        size = math.prod(shape) * (4 if type_name == "F32" else 2)
        before += size
        if roles.is_product(name, shape) and not roles.is_end(name):
            specs = _packed_specs(name.removesuffix("weight"), shape, kind)
            planned.append(Planned(specs, functools.partial(_packed, checkpoint, name, kind)))
            continue
        ignored += [name.removesuffix(".weight")] if len(shape) == 2 and not roles.is_end(name) else []
        planned.append(
            Planned((TensorSpec(name, type_name, shape, size),), functools.partial(_as_stored, checkpoint, name))
        )
    target.mkdir()
    write_safetensors(target / "model.safetensors", planned, _progress_over(planned, progress))
    for pattern in _COMPANIONS:
        for path in source.glob(pattern):
            if not path.name.endswith(".safetensors.index.json"):
                shutil.copy(path, target)
    config["quantization_config"] = _quantization_config(kind, ignored)
    (target / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return _summary(planned, before)


class _Roles:
    """What a checkpoint's tensors are to the network, by the names that its family has for them."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._ends = [_pattern(names[path]) for path in _ENDS if path in names]
        self._router = _pattern(names[_ROUTER]) if _ROUTER in names else None
        self._matrices = [_pattern(name) for path, name in names.items() if path.endswith(".weight")]

    def is_end(self, name: str) -> bool:
        return any(each.fullmatch(name) for each in self._ends)

    def is_product(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether it is a matrix of whole blocks that activations are multiplied with, and no router."""
        if len(shape) < 2 or shape[-1] % BLOCK_SIZE or (self._router is not None and self._router.fullmatch(name)):
            return False
        return any(each.fullmatch(name) for each in self._matrices)


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{\w+\\}", r"\\d+", re.escape(template)))


def _of_one(data: np.ndarray) -> Sequence[np.ndarray]:
    return [data]


def _as_stored(checkpoint: SafetensorsCheckpoint, name: str) -> Sequence[np.ndarray]:
    return [checkpoint.read(name)]


def _rounded(checkpoint: GgufCheckpoint | SafetensorsCheckpoint, name: str, kind: QuantKind) -> RoundedRows:
    values = checkpoint.read(name)
    assert isinstance(values, np.ndarray)
    rows = round_rows(values.reshape(-1, values.shape[-1]), kind)
    checkpoint.release()
    if not np.isfinite(rows.scales).all() or (rows.mins is not None and not np.isfinite(rows.mins).all()):
        raise CheckpointError(f"{checkpoint.origin}: {name} has values that float16 scales cannot hold: it is damaged")
    return rows


def _blocks(checkpoint: GgufCheckpoint, name: str, kind: QuantKind) -> Sequence[np.ndarray]:
    return [join_blocks(pack_rows(_rounded(checkpoint, name, kind), kind))]


def _packed(checkpoint: SafetensorsCheckpoint, name: str, kind: QuantKind) -> Sequence[np.ndarray]:
    rows = _rounded(checkpoint, name, kind)
    return [pack_words(rows.quants), rows.scales, np.array(rows.quants.shape, np.int64)]


def _packed_specs(stem: str, shape: tuple[int, ...], kind: QuantKind) -> tuple[TensorSpec, ...]:
    out, inputs = shape
    words, groups = inputs // (4 if kind == "q8_0" else 8), inputs // BLOCK_SIZE
    return (
        TensorSpec(f"{stem}weight_packed", "I32", (out, words), 4 * out * words),
        TensorSpec(f"{stem}weight_scale", "F16", (out, groups), 2 * out * groups),
        TensorSpec(f"{stem}weight_shape", "I64", (2,), 16),
    )


def _quantization_config(kind: QuantKind, ignored: Sequence[str]) -> dict[str, Any]:
    weights = {
        "num_bits": 8 if kind == "q8_0" else 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": BLOCK_SIZE,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
    }


def _progress_over(planned: Sequence[Planned], progress: ProgressCallback | None) -> Callable[[TensorSpec], None]:
    total, done = sum(spec.nbytes for each in planned for spec in each.tensors), 0

    def wrote(spec: TensorSpec) -> None:
        nonlocal done
        done += spec.nbytes
        if progress is not None:
            progress(LoadProgress(spec.name, done, total))

    return wrote


def _summary(planned: Sequence[Planned], before: int) -> QuantizedCopy:
    specs = [spec for each in planned for spec in each.tensors]
    rounded = sum(spec.type.startswith("Q") or spec.type == "I32" for spec in specs)
    return QuantizedCopy(before, sum(spec.nbytes for spec in specs), rounded)
