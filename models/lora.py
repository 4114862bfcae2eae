"""LoRA adapters as PEFT writes them: a directory of adapter_config.json and adapter_model.safetensors.

An adapter is read whole, as float32 stacks of the decoder's projections with its scale multiplied in, and named by a
digest of just that, so that two copies under different names are one. Whatever would change the arithmetic and is not
implemented is refused by name, and so is a tensor that no projection of the model takes.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kv_common.errors import JaxkvError
from models.assembly import Rows, parameter_shapes
from models.config import UnsupportedModelError
from models.config_fields import ConfigFields, read_json
from models.decoder import Decoder
from models.families import FAMILIES, Family
from models.safetensors_loader import SafetensorsCheckpoint

CONFIG_NAME, TENSORS_NAME = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight")
# How the adapter was trained, or what its tensors say better.
_HARMLESS = frozenset(
    (
        *("arrow_config", "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules"),
        *("inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout"),
        *("megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config"),
        *("target_modules", "task_type"),
    )
)


class AdapterError(JaxkvError):
    """An adapter that cannot be read, or that does not fit the model."""


class AdapterPair(NamedTuple):
    """What is added to a projection of each layer: into [layers, rank, in], out [layers, out, rank] f32, scaled."""

    into: np.ndarray
    out: np.ndarray


class Adapter(NamedTuple):
    """An adapter in memory: `pairs` by the decoder's path of each projection that it changes, `rank` the largest;
    `fingerprint`, 32 bytes, by content.
    """

    fingerprint: bytes
    rank: int
    pairs: Mapping[str, AdapterPair]


class _Scaling(NamedTuple):
    """The rank and the alpha of each module, by patterns of its name."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, Any]
    alpha_pattern: Mapping[str, Any]
    by_root: bool

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), float(_by_pattern(self.alpha_pattern, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.by_root else rank)


def check_files(directory: str | Path) -> None:
    """Raises AdapterError where `directory` is not that of an adapter."""
    for name in (CONFIG_NAME, TENSORS_NAME):
        if not (Path(directory) / name).is_file():
            raise AdapterError(f"{directory} has no {name}: give the directory of a PEFT LoRA adapter")


def read_adapter(directory: str | Path, decoder: Decoder) -> Adapter:
    """The adapter in `directory` for the projections of `decoder`.

    Raises:
        AdapterError, ModelConfigError, UnsupportedModelError, CheckpointError: one line each: it cannot be read, asks
            for what is not implemented, or does not fit; the first tensor that does not is named.
    """
    directory = Path(directory)
    check_files(directory)
    scaling = _scaling(ConfigFields(read_json(directory / CONFIG_NAME), str(directory / CONFIG_NAME)))
    checkpoint = SafetensorsCheckpoint(directory)
    origin = str(directory / TENSORS_NAME)
    modules: dict[str, dict[str, np.ndarray]] = {}
    for name in sorted(checkpoint.names):
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise UnsupportedModelError(
                f"{origin} has {name}, implemented are lora_A and lora_B of projections: use an adapter without it"
            )
        # An adapter of what is below the output matrix, as AutoModel has it, names the same modules from there on.
        module = f"model.{match[1]}" if match[1].startswith("layers.") else match[1]
        modules.setdefault(module, {})[match[2]] = np.asarray(checkpoint.read(name), np.float32)
    checkpoint.release()
    if not modules:
        raise AdapterError(f"{origin} has no tensors: get the adapter again")
    scaled = {
        module: _scaled(origin, module, parts.get("A"), parts.get("B"), scaling) for module, parts in modules.items()
    }
    for module, pair in scaled.items():
        _check_numbers(origin, module, pair, decoder.dtype)
    pairs = _stacked(origin, scaled, decoder)
    rank = max(pair.into.shape[1] for pair in pairs.values())
    return Adapter(_fingerprint(pairs), rank, pairs)


def _scaling(fields: ConfigFields) -> _Scaling:
    fields.require("peft_type", "LORA")
    fields.require("bias", "none")
    fields.require("fan_in_fan_out", False)
    # Others leave their mark in the weights of the model itself.
    fields.require("init_lora_weights", True, False, "gaussian", "eva", "orthogonal")
    rank, alpha = fields.take("r", int, 8), fields.take("lora_alpha", float, 8.0)
    scaling = _Scaling(
        rank,
        alpha,
        fields.take("rank_pattern", dict, {}),
        fields.take("alpha_pattern", dict, {}),
        fields.take("use_rslora", bool, False),
    )
    ranks, alphas = (rank, *scaling.rank_pattern.values()), scaling.alpha_pattern.values()
    if not all(isinstance(each, int) and each >= 1 for each in ranks):
        raise AdapterError(f"{fields.origin} has ranks {ranks}, which are not all whole numbers of at least 1: fix it")
    if not all(isinstance(each, int | float) for each in alphas):
        raise AdapterError(f"{fields.origin} has an alpha_pattern of {list(alphas)}, which are not all numbers: fix it")
    for pattern in (*scaling.rank_pattern, *scaling.alpha_pattern):
        try:
            re.compile(pattern)
        except re.error as error:
            raise AdapterError(
                f"{fields.origin} has the pattern {pattern!r}, which is none ({error}): fix it"
            ) from error
    fields.refuse_unread(_HARMLESS)
    return scaling


def _by_pattern(patterns: Mapping[str, Any], module: str, default: float) -> float:
    """The value of the first pattern that matches the end of a module's name, as PEFT looks it up."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
            return float(value)
    return default


def _scaled(
    origin: str, module: str, into: np.ndarray | None, out: np.ndarray | None, scaling: _Scaling
) -> AdapterPair:
    """A module's pair [rank, in] and [out, rank], the scale in the second."""
    if into is None or out is None:
        raise AdapterError(f"{origin} has half of {module}: both lora_A and lora_B are needed, get it again")
    rank = scaling.rank_of(module)
    if into.ndim != 2 or out.ndim != 2 or into.shape[0] != rank or out.shape[1] != rank:
        raise AdapterError(
            f"{origin}: {module} has lora_A {list(into.shape)} and lora_B {list(out.shape)}, {CONFIG_NAME} calls for "
            f"rank {rank}: they do not belong together, get both again"
        )
    with np.errstate(over="ignore", invalid="ignore"):  # refused below, by name
        return AdapterPair(into, out * np.float32(scaling.scale_of(module)))


def _check_numbers(origin: str, module: str, pair: AdapterPair, dtype: str) -> None:
    """Refuse what would spoil every request: all tokens of a step multiply by the columns of all adapters."""
    largest = float(np.max([np.abs(part).max(initial=0) for part in pair]))  # which is nan where one is
    limit = float(jnp.finfo(dtype).max)
    if not largest <= limit:
        raise AdapterError(
            f"{origin}: {module} has a number of size {largest:g}, scaled by its alpha, and {dtype} ends at {limit:g}: "
            "get the adapter again, or load the model with a wider dtype"
        )


def _stacked(origin: str, modules: Mapping[str, AdapterPair], decoder: Decoder) -> dict[str, AdapterPair]:
    """The pairs of each projection over all layers; layers and ranks that the adapter lacks are zero."""
    family = _family_of(decoder.config.architecture)
    rows: Mapping[str, Rows] = family.hf_rows(decoder.config)
    shapes = parameter_shapes(decoder)
    pairs: dict[str, AdapterPair] = {}
    taken: set[str] = set()
    for path in (path.removesuffix(".weight") for path in shapes if _is_projection(path)):
        template = family.hf_names[f"{path}.weight"].removesuffix(".weight")
        names = [template.format(layer=layer) for layer in range(decoder.config.num_layers)]
        found = {layer: modules[name] for layer, name in enumerate(names) if name in modules}
        taken.update(name for name in names if name in modules)
        if not found:
            continue
        layers, out_features, in_features = shapes[f"{path}.weight"].shape
        own = rows.get(f"{path}.weight")
        rank = max(len(pair.into) for pair in found.values())
        into = np.zeros((layers, rank, in_features), np.float32)
        out = np.zeros((layers, out_features, rank), np.float32)
        for layer, pair in found.items():
            total = out_features if own is None else own.total
            if pair.into.shape[1] != in_features or pair.out.shape[0] != total:
                raise AdapterError(
                    f"{origin}: {names[layer]} maps {pair.into.shape[1]} features to {pair.out.shape[0]}, the model's "
                    f"maps {in_features} to {total}: the adapter is of another model"
                )
            into[layer, : len(pair.into)] = pair.into
            out[layer, :, : len(pair.into)] = pair.out if own is None else pair.out[own.order]
        pairs[path] = AdapterPair(into, out)
    left = sorted(modules.keys() - taken)
    if left:
        raise AdapterError(
            f"{origin} adapts {left[0]}{f' and {len(left) - 1} more' if len(left) > 1 else ''}, which is no projection "
            "of attention or MLP in this model: use an adapter of this model without it"
        )
    return pairs


def _is_projection(path: str) -> bool:
    return re.fullmatch(r"layers\.(attention\.[qkvo]|mlp\.(gate|up|down))\.weight", path) is not None


def _family_of(architecture: str) -> Family:
    """The family by its name, or by that of its files of another kind; modules are named as Hugging Face does."""
    for family in FAMILIES.values():
        if architecture == family.name or (family.gguf is not None and architecture == family.gguf.architecture):
            return family
    raise UnsupportedModelError(f"adapters of architecture {architecture!r} are not implemented")


def _fingerprint(pairs: Mapping[str, AdapterPair]) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for path, pair in sorted(pairs.items()):
        for part in pair:
            digest.update(f"{path} {part.shape} ".encode())
            digest.update(np.ascontiguousarray(part).view(np.uint8).data)
    return digest.digest()
