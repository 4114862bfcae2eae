"""`quantization_config` of a config.json: which format of `models.packed_weights` its matrices are stored in.

What would change the arithmetic and is not implemented is refused by name; so is what is not known. Activations keep
their precision, so what a configuration says about quantizing them is passed over.
"""

from __future__ import annotations

from typing import Any

from models.config import UnsupportedModelError
from models.config_fields import ConfigFields
from models.packed_weights import PackedFormat, awq, gptq, packed_integers, plain_bytes

# How the checkpoint was made, or how other programs are to run it. Which modules are quantized their tensors say.
_HARMLESS = frozenset(
    {
        *("quant_method", "modules_to_not_convert", "ignore", "ignored_layers", "exllama_config", "use_exllama"),
        *("disable_exllama", "backend", "version", "damp_percent", "damp_auto_increment", "static_groups", "dataset"),
        *("true_sequential", "model_name_or_path", "model_file_base_name", "model_seqlen", "block_name_to_quantize"),
        *("module_name_preceding_first_block", "modules_in_block_to_quantize", "batch_size", "pad_token_id", "meta"),
        *("use_cuda_fp16", "cache_block_outputs", "max_input_length", "tokenizer", "lm_head", "do_fuse", "hyb_act"),
        *("fuse_max_seq_len", "modules_to_fuse", "desc_act", "activation_scheme", "global_compression_ratio"),
        *("quantization_status", "dequantize", "mse"),
    }
)
_ACTIVATIONS = ("input_activations", "output_activations")


def packed_format(raw: dict[str, Any]) -> PackedFormat:
    """The format that a `quantization_config` names.

    Raises:
        ModelConfigError, UnsupportedModelError: it is incomplete, or says something that is not implemented.
    """
    fields = ConfigFields(raw, "config.json's quantization_config")
    method = fields.take("quant_method", str)
    read = _METHODS.get(method)
    if read is None:
        raise UnsupportedModelError(
            f"config.json has quant_method {method!r}, implemented are {', '.join(sorted(_METHODS))}: use a checkpoint "
            "in one of those, or a GGUF"
        )
    form = read(fields)
    fields.refuse_unread(_HARMLESS)
    return form


def _awq(fields: ConfigFields) -> PackedFormat:
    fields.require("bits", 4)
    fields.require("w_bit", 4)
    fields.skip("group_size", "q_group_size")  # the shape of the scales says it
    fields.require("zero_point", True)
    fields.require("version", "gemm", "GEMM")
    return awq()


def _gptq(fields: ConfigFields) -> PackedFormat:
    fields.require("bits", 4)
    fields.require("is_marlin_format", False)
    fields.require("pack_dtype", "int32")
    fields.require("dynamic", {})
    fields.skip("group_size")
    form = fields.take("checkpoint_format", str, "gptq")
    if form not in ("gptq", "gptq_v2"):
        fields.require("checkpoint_format", "gptq", "gptq_v2")
    return gptq(symmetric=fields.take("sym", bool), zero_offset=1 if form == "gptq" else 0)


def _fp8(fields: ConfigFields) -> PackedFormat:
    fields.require("fmt", "e4m3")
    fields.require("scale_fmt", "float", "ue8m0")
    block = fields.take("weight_block_size", list, None)
    if block is None:
        return plain_bytes("f8_e4m3", "weight_scale")
    return plain_bytes("f8_e4m3", "weight_scale_inv", _block(block, fields))


def _compressed_tensors(fields: ConfigFields) -> PackedFormat:
    fields.require("kv_cache_scheme")
    fields.require("sparsity_config", {})
    fields.require("transform_config", {})
    stated = fields.take("format", str)
    groups = fields.take("config_groups", dict)
    if len(groups) != 1 or not all(isinstance(group, dict) for group in groups.values()):
        raise UnsupportedModelError(
            f"{fields.origin} has {len(groups)} config_groups, implemented is one: use a checkpoint whose matrices are "
            "all quantized alike"
        )
    group = ConfigFields(next(iter(groups.values())), f"{fields.origin}'s config_groups")
    group.skip("targets", *_ACTIVATIONS)
    group.require("format", stated)
    weights = ConfigFields(group.take("weights", dict), f"{group.origin}' weights")
    form = _compressed_weights(stated, weights)
    weights.refuse_unread(frozenset({"observer", "observer_kwargs", "block_structure", "group_size", "scale_dtype"}))
    group.refuse_unread(frozenset())
    return form


def _compressed_weights(stated: str, weights: ConfigFields) -> PackedFormat:
    weights.require("dynamic", False)
    weights.require("actorder", "weight", "static")  # these leave the inputs in their order
    weights.skip("zp_dtype")
    bits, kind = weights.take("num_bits", int), weights.take("type", str, "int")
    symmetric = weights.take("symmetric", bool, True)
    strategy = weights.take("strategy", str, "tensor")
    if strategy not in ("tensor", "channel", "group", "block"):
        weights.require("strategy", "tensor", "channel", "group", "block")
    if stated == "pack-quantized" and kind == "int" and (bits == 4 or (bits == 8 and symmetric)):
        return packed_integers(bits, symmetric=symmetric)
    is_bytes = bits == 8 and symmetric and stated in ("naive-quantized", f"{kind}-quantized")
    if is_bytes and kind in ("int", "float"):
        block = _block(weights.take("block_structure", list), weights) if strategy == "block" else None
        return plain_bytes("q8_0" if kind == "int" else "f8_e4m3", "weight_scale", block)
    raise UnsupportedModelError(
        f"{weights.origin} are {kind} of {bits} bits, symmetric {symmetric}, in format {stated!r}; implemented are "
        "pack-quantized int of 4, symmetric int of 8 and float of 8: use a checkpoint in one of those"
    )


def _block(block: list[Any], fields: ConfigFields) -> tuple[int, int]:
    if len(block) != 2 or not all(isinstance(each, int) and each > 0 for each in block):
        raise UnsupportedModelError(f"{fields.origin} has blocks of {block!r}, implemented are [rows, columns]: fix it")
    return block[0], block[1]


_METHODS = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed_tensors}
