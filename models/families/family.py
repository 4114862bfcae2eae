"""What a family provides.

Parameter paths are those of `models.decoder` joined with dots (`layers.attention.q.weight`); weight names are templates
in which `{layer}` and `{expert}` stand for numbers. A stack's entries are read by name in layer order, and in expert
order within a layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from models.assembly import Rows
from models.config import DecoderConfig
from models.config_fields import ConfigFields
from models.families.gguf_model import GgufModel

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


@dataclasses.dataclass(frozen=True)
class Family:
    """A family as Hugging Face directories hold it, `name` is model_type in config.json; and as GGUF, where that can.

    hf_names, hf_rows, hf_ignored: as in `GgufFormat`. hf_norm_offset is what the stored weights of norms lack.
    """

    name: str
    hf_architectures: frozenset[str]
    hf_config: Callable[[ConfigFields], DecoderConfig]
    hf_names: Mapping[str, str]
    hf_rows: RowsOf = own_tensors
    # Old checkpoints saved the inverse frequencies, which are a function of the configuration.
    hf_ignored: tuple[str, ...] = (
        r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        r"model\.rotary_emb\.inv_freq",
    )
    hf_norm_offset: float = 0.0
    gguf: GgufFormat | None = None
