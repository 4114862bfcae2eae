"""What a family provides.

Parameter paths are those of `models.decoder` joined with dots (`layers.attention.q.weight`); weight names are templates
in which `{layer}` stands for the layer's number. A stack's entries are read by name in layer order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

import numpy as np

from models.config import ConfigFields, DecoderConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """hf_names, gguf_names: weight name template of every parameter the family can have.

    gguf_config also gets the names of the file's tensors and its RoPE frequency factors, which GGUF keeps as a tensor;
    gguf_row_orders: for parameters whose rows GGUF reorders, the file's row for each of ours.
    hf_ignored: patterns (whole-name regular expressions) of tensors that carry nothing the network needs.
    """

    name: str
    hf_architectures: frozenset[str]
    hf_config: Callable[[ConfigFields], DecoderConfig]
    gguf_config: Callable[[ConfigFields, Collection[str], tuple[float, ...] | None], DecoderConfig]
    hf_names: Mapping[str, str]
    gguf_names: Mapping[str, str]
    gguf_row_orders: Callable[[DecoderConfig], Mapping[str, np.ndarray]]
    hf_ignored: tuple[str, ...] = ()
    gguf_ignored: tuple[str, ...] = ()
