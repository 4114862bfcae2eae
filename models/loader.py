"""`load_model`: a directory, a GGUF file or a hub repository in, one ready model out.

The model is a value: parameters, a pure forward function, sizes, tokenizer, chat template and sampling defaults. It
owns no cache and no device state beyond its parameters, so an engine, a test and an exporter can all use the same one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import jax
from jax.sharding import Mesh

from kv_common.model_spec import ModelSpec
from kv_kernels.adapters import AdapterCapacity
from kv_kernels.tensor_parallel import TensorMesh, TensorParallelError
from models.adapted_model import AdaptedModel
from models.assembly import ProgressCallback, assemble, parameter_shapes
from models.chat_template import ChatTemplate, template_from_directory, template_from_gguf
from models.checkpoint import CheckpointError
from models.config import ModelConfigError, UnsupportedModelError
from models.config_fields import ConfigFields, read_json
from models.context import fit_context
from models.decoder import Decoder
from models.decoder_functions import DecoderFunctions
from models.families import family_of, gguf_format_of
from models.families.gguf_model import GgufModel
from models.generation import GenerationDefaults, generation_from_directory, generation_from_gguf
from models.gguf_loader import GgufCheckpoint
from models.gguf_tokenizer import tokenizer_from_gguf
from models.lora import Adapter, read_adapter
from models.output_heads import drop_tied_copy, labels_of
from models.placement import mesh_for, update_with_content
from models.quantized_checkpoint import open_checkpoint
from models.spreading import spread_parameters
from models.tokenizer import Tokenizer, first_line, tokenizer_from_directory

logger = logging.getLogger(__name__)

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_ID = re.compile(r"[^/.~][^/]*/[^/]+")
_WEIGHT_FILES = (".gguf", ".safetensors")


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel(DecoderFunctions):
    """A model ready to run.

    params: nested dicts of device arrays and weights, the first argument of `forward`.
    tokenizer, chat_template: None where the source has none. tensor_mesh: what the parameters are spread over; None
    for one device. labels: names of the scores of a classifier.
    """

    spec: ModelSpec
    params: dict[str, Any]
    decoder: Decoder = dataclasses.field(repr=False)
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    generation: GenerationDefaults
    tensor_mesh: TensorMesh | None = None
    labels: tuple[str, ...] = ()

    def spread(self, tensor_parallel: int | Mesh) -> LoadedModel:
        """The same model over so many devices, or a mesh as `load_model` takes it; this one stays as it is.

        Raises TensorParallelError, also for a model that is spread already.
        """
        if self.tensor_mesh is not None:
            raise TensorParallelError(
                f"{self.spec.name} is spread over {self.tensor_mesh.width} devices already: load it anew for "
                "another mesh"
            )
        mesh = mesh_for(self.decoder.config, tensor_parallel)
        if mesh is None:
            return self
        params = spread_parameters(self.params, parameter_shapes(self.decoder), mesh)
        return dataclasses.replace(self, params=params, tensor_mesh=mesh)

    def read_adapter(self, directory: str | Path) -> Adapter:
        """The PEFT LoRA adapter in a directory. Raises what `models.lora.read_adapter` raises."""
        return read_adapter(directory, self.decoder)

    def with_adapters(self, slots: int, rank: int) -> AdaptedModel:
        """The model with room for `slots` adapters of at most `rank`; it shares the parameters."""
        return AdaptedModel(self, AdapterCapacity(slots, rank))

    @functools.cached_property
    def fingerprint(self) -> bytes:
        """32 bytes: the configuration, the dtype and every bit of the weights as they lie in memory; not where they
        came from, nor how long sequences may be where that changes no frequency.
        """
        config = dataclasses.replace(self.decoder.config, max_context=1)
        digest = hashlib.blake2b(repr((config, self.decoder.dtype)).encode(), digest_size=32)
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.params):
            digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} ".encode())
            update_with_content(digest, leaf)
        return digest.digest()


class _Wanted(NamedTuple):
    """What `load_model` is asked for beside its source."""

    dtype: str
    max_context: int | None
    tensor_parallel: int | Mesh
    progress: ProgressCallback | None


def load_model(
    source: str | Path,
    *,
    dtype: str = "float32",
    max_context: int | None = None,
    tensor_parallel: int | Mesh = 1,
    progress: ProgressCallback | None = None,
) -> LoadedModel:
    """Load `source`: a Hugging Face directory, a .gguf file, or a hub repository id such as `owner/name`.

    What exists on disk is never looked up on the hub, nor is what can only be a path: a `Path`, a name that ends like a
    file of weights, begins with `/`, `.` or `~`, or has other than one slash.

    dtype is the compute dtype, float32, bfloat16 or float16; dense weights are cast to it, but those of 16 bits are not
    widened, and quantized ones stay as they are. max_context is the longest sequence, prompt and answer; None is what
    the model takes as it stands. Models with longrope or dynamic NTK take more than that: they then turn every position
    with the frequencies of long sequences.
    tensor_parallel is the number of devices to spread the model over, or a mesh of the user's that has the axes
    `kv_head_shard` and `kv_head_replica`; an engine follows it. Said here, parameters go to their devices as they are
    read, and a model that no single device could hold never has to be on one; said to the engine, they are copied.

    Raises CheckpointError, ContextError, ModelConfigError, UnsupportedModelError, TensorParallelError, TokenizerError.
    """
    if not isinstance(source, (str, Path)) or not str(source):
        raise CheckpointError(
            f"a model source is a path or owner/name, got {source!r}: name a directory, a .gguf or a repo"
        )
    if dtype not in COMPUTE_DTYPES:
        raise UnsupportedModelError(f"compute dtype {dtype!r} is not implemented: use {', '.join(COMPUTE_DTYPES)}")
    wanted = _Wanted(dtype, max_context, tensor_parallel, progress)
    path = Path(os.path.expanduser(source))
    # os.path, because Path's own raise for a name too long or a home that does not exist.
    if os.path.isdir(path):
        return _load_directory(path, path.resolve().name, wanted)
    if os.path.isfile(path):
        if path.suffix == ".safetensors":
            raise CheckpointError(f"{path} holds weights alone: give the directory that has it beside its config.json")
        return _load_gguf(path, wanted)
    if isinstance(source, str) and _HUB_ID.fullmatch(source) and not source.endswith(_WEIGHT_FILES):
        return _load_directory(_download(source), source, wanted)
    raise CheckpointError(
        f"{source}: no such file or directory: give a model directory, a .gguf file or a hub id (owner/name)"
    )


def _load_directory(directory: Path, name: str, wanted: _Wanted) -> LoadedModel:
    if not (directory / "config.json").exists():
        found = sorted(directory.glob("*.gguf"))
        remedy = f"give {found[0]}" if found else "give a model directory or a .gguf file"
        raise ModelConfigError(f"{directory} has no config.json: {remedy}")
    raw = read_json(directory / "config.json")
    architecture = ConfigFields(raw, "config.json").take("model_type", str)
    family = family_of(architecture, "config.json")
    quantization = raw.pop("quantization_config", None)
    stated = family.read_config(raw)
    labels = labels_of(raw, family, tied=stated.tied_embeddings)
    num_labels = None if labels is None else len(labels)
    config = fit_context(dataclasses.replace(stated, num_labels=num_labels), wanted.max_context, name)
    decoder = Decoder(config, wanted.dtype)
    checkpoint = open_checkpoint(directory, quantization)
    names = family.hf_names_in(checkpoint.names)
    if config.tied_embeddings:
        drop_tied_copy(checkpoint, names)
    mesh = mesh_for(config, wanted.tensor_parallel)
    params = assemble(
        decoder,
        checkpoint,
        names,
        dtype=wanted.dtype,
        ignored=family.hf_ignored,
        rows=family.hf_rows(config),
        norm_offset=family.hf_norm_offset,
        mesh=mesh,
        progress=wanted.progress,
    )
    tokenizer = tokenizer_from_directory(directory)
    generation = generation_from_directory(directory, raw)
    template = template_from_directory(directory, tokenizer)
    return _finish(name, decoder, params, mesh, tokenizer, template, generation, labels or ())


def _load_gguf(path: Path, wanted: _Wanted) -> LoadedModel:
    checkpoint = GgufCheckpoint(path)
    metadata = checkpoint.file.metadata
    architecture = ConfigFields(metadata, path.name).take("general.architecture", str)
    form = gguf_format_of(architecture, path.name)
    prefix = f"{architecture}."
    fields = ConfigFields({key: value for key, value in metadata.items() if key.startswith(prefix)}, path.name)
    if f"{prefix}vocab_size" not in fields and "token_embd.weight" in checkpoint.names:
        # Older converters leave it out; the embedding has it.
        fields.supply(f"{prefix}vocab_size", checkpoint.shape("token_embd.weight")[0])
    stated = form.config(GgufModel(fields, architecture, checkpoint.names, checkpoint.numbers))
    config = fit_context(stated, wanted.max_context, path.name)
    decoder = Decoder(config, wanted.dtype)
    mesh = mesh_for(config, wanted.tensor_parallel)
    with ThreadPoolExecutor(max_workers=1) as beside:  # weights are copied outside of Python's lock
        reading = beside.submit(tokenizer_from_gguf, metadata, path.name)
        params = assemble(
            decoder,
            checkpoint,
            form.names_in(checkpoint.names),
            dtype=wanted.dtype,
            ignored=form.ignored,
            rows=form.rows(config),
            mesh=mesh,
            progress=wanted.progress,
        )
        tokenizer = reading.result()
    generation = generation_from_gguf(metadata)
    template = template_from_gguf(metadata, tokenizer)
    return _finish(path.stem, decoder, params, mesh, tokenizer, template, generation)


def _finish(
    name: str,
    decoder: Decoder,
    params: dict[str, Any],
    mesh: TensorMesh | None,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    generation: GenerationDefaults,
    labels: tuple[str, ...] = (),
) -> LoadedModel:
    config = decoder.config
    if tokenizer is not None and tokenizer.plain_vocab_size > config.vocab_size:
        raise ModelConfigError(
            f"{name}: the tokenizer has {tokenizer.vocab_size} tokens, the model embeds {config.vocab_size}: "
            "they do not belong together, get both again"
        )
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        # Text models that come from one that also sees have its tokens for images; an engine refuses prompts with them.
        logger.warning(
            "%s: the model does not embed %d of the tokens that were added to its tokenizer",
            *(name, tokenizer.vocab_size - config.vocab_size),
        )
    spec = ModelSpec(
        name=name,
        architecture=config.architecture,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        dtype=decoder.dtype,
        num_parameters=sum(math.prod(each.shape) for each in parameter_shapes(decoder).values()),
        parameter_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        eos_token_ids=generation.eos_token_ids,
        attention_window=max((window for window in config.windows if window is not None), default=None),
        attention_reach=None if None in config.windows else max(each for each in config.windows if each is not None),
        attention_soft_cap=config.attention_soft_cap,
        num_labels=config.num_labels,
    )
    logger.info(
        "%s: %d parameters in %d bytes, %s compute", name, spec.num_parameters, spec.parameter_bytes, spec.dtype
    )
    return LoadedModel(spec, params, decoder, tokenizer, template, generation, mesh, labels)


def _download(repository: str) -> Path:
    """Snapshot of a hub repository, from the local cache where it is there already."""
    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{repository} is not a path and cannot be downloaded ({first_line(error)}): check the name and the network"
        ) from error
