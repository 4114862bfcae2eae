"""What a family provides.

Parameter paths are those of `models.decoder` joined with dots (`layers.attention.q.weight`); weight names are templates
in which `{layer}` and `{expert}` stand for numbers. A stack's entries are read by name in layer order, and in expert
order within a layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from models.assembly import Rows
from models.config import DecoderConfig
from models.config_fields import ConfigFields
from models.families.gguf_model import GgufModel
from models.families.names import SEPARATE_EXPERTS

RowsOf = Callable[[DecoderConfig], Mapping[str, Rows]]


def own_tensors(config: DecoderConfig) -> Mapping[str, Rows]:
    """Every parameter's rows as they lie in a tensor of its own."""
    return {}


@dataclasses.dataclass(frozen=True)
class GgufFormat:
    """How llama.cpp's converter writes a family: `architecture` is general.architecture in the file.

    names: weight name template of every parameter; rows: of parameters whose rows the file reorders or fuses.
    ignored: patterns (whole-name regular expressions) of tensors that carry nothing the network needs.
    """

    architecture: str
    config: Callable[[GgufModel], DecoderConfig]
    names: Mapping[str, str]
    rows: RowsOf = own_tensors
    ignored: tuple[str, ...] = (r"rope_freqs\.weight", r"rope_factors_(long|short)\.weight", r"blk\.\d+\.attn_rot_embd")

    def names_in(self, tensor_names: Collection[str]) -> Mapping[str, str]:
        """`names`, or in one of the first files of a mixture those of a tensor for each expert."""
        separate = SEPARATE_EXPERTS["layers.mlp.expert_gate.weight"].format(layer=0, expert=0) in tensor_names
        return {**self.names, **SEPARATE_EXPERTS} if separate else self.names


@dataclasses.dataclass(frozen=True)
class Family:
    """A family as Hugging Face directories hold it, `name` is model_type in config.json; and as GGUF, where that can.

    hf_names, hf_rows, hf_ignored: as in `GgufFormat`. hf_norm_offset is what the stored weights of norms lack.
    hf_defaults: fields of config.json that mean something else where they are absent than they do for Llama.
    """

    name: str
    hf_architectures: frozenset[str]
    hf_config: Callable[[ConfigFields], DecoderConfig]
    hf_names: Mapping[str, str]
    hf_rows: RowsOf = own_tensors
    # Old checkpoints saved the inverse frequencies, which are a function of the configuration.
    hf_ignored: tuple[str, ...] = (r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
    hf_norm_offset: float = 0.0
    hf_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gguf: GgufFormat | None = None

    def read_config(self, raw: Mapping[str, Any]) -> DecoderConfig:
        """What config.json says. Raises ModelConfigError or UnsupportedModelError, naming the field."""
        return self.hf_config(ConfigFields({**self.hf_defaults, **raw}, "config.json"))

    def hf_names_in(self, tensor_names: Collection[str]) -> Mapping[str, str]:
        """`hf_names`, without `model.` where a checkpoint has just what is below the output matrix (AutoModel's)."""
        bare = {path: name.removeprefix("model.") for path, name in self.hf_names.items()}
        return bare if bare["embedding.weight"] in tensor_names else self.hf_names
