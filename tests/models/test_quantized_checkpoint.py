"""Quantized Hugging Face directories: every format's values by its definition, and what is refused by name."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from model_files import copy_case

from kv_common.errors import JaxkvError
from kv_kernels.dequantize import dequantize
from kv_kernels.weights import BlockQuantWeight, DenseWeight
from models import load_model

Parts = dict[str, np.ndarray]
Made = tuple[Parts, np.ndarray]
"""The tensors of a module, and the values [out, in] that their format gives them."""


def packed(numbers: np.ndarray, axis: int, bits: int = 4, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Numbers in words of 32 bits along `axis`; number i of a word is the one that `order` says."""
    per_word = 32 // bits
    rows = np.moveaxis(numbers, axis, -1).astype(np.uint32)
    words = np.zeros((*rows.shape[:-1], rows.shape[-1] // per_word), np.uint32)
    for place, of in enumerate(order or range(per_word)):
        words |= rows[..., of::per_word] << np.uint32(bits * place)
    return np.ascontiguousarray(np.moveaxis(words.view(np.int32), -1, axis))


def grouped(numbers: np.ndarray, inputs: int) -> np.ndarray:
    """[out, groups] as [out, in]."""
    return numbers.astype(np.float32).repeat(inputs // numbers.shape[1], axis=1)


def four_bits(rng: np.random.Generator, shape: tuple[int, int], group: int, scale_type: type = np.float16):
    out, inputs = shape
    quants = rng.integers(0, 16, shape)
    scales = rng.uniform(0.01, 0.03, (out, inputs // group)).astype(scale_type)
    zeros = rng.integers(1, 16, scales.shape)
    return quants, scales, zeros, (quants - grouped(zeros, inputs)) * grouped(scales, inputs)


def awq(rng: np.random.Generator, shape: tuple[int, int]) -> Made:
    quants, scales, zeros, values = four_bits(rng, shape, 64)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": packed(quants.T, 1, order=order),
        "qzeros": packed(zeros.T, 1, order=order),
        "scales": np.ascontiguousarray(scales.T),
    }
    return parts, values


def gptq(zero_offset: int, *, symmetric: bool = False, activation_order: bool = False):
    def make(rng: np.random.Generator, shape: tuple[int, int]) -> Made:
        quants, scales, zeros, values = four_bits(rng, shape, 32)
        if symmetric:
            zeros[:] = 8
            values = (quants - 8) * grouped(scales, shape[1])
        groups = np.arange(shape[1], dtype=np.int32) // 32
        parts = {
            "qweight": packed(quants.T, 0),
            "qzeros": packed((zeros - zero_offset).T, 1),
            "scales": np.ascontiguousarray(scales.T),
            "g_idx": rng.permutation(groups) if activation_order else groups,
        }
        return parts, values

    return make


def packed_four_bits(*, symmetric: bool):
    def make(rng: np.random.Generator, shape: tuple[int, int]) -> Made:
        quants, scales, zeros, values = four_bits(rng, shape, 32, ml_dtypes.bfloat16)
        parts = {"weight_packed": packed(quants, 1), "weight_scale": scales, "weight_shape": np.array(shape)}
        if symmetric:
            return parts, (quants - 8) * grouped(scales, shape[1])
        return parts | {"weight_zero_point": packed(zeros, 0)}, values

    return make


def packed_eight_bits(rng: np.random.Generator, shape: tuple[int, int]) -> Made:
    quants, scales = rng.integers(-128, 128, shape), rng.uniform(0.001, 0.003, (shape[0], 1)).astype(ml_dtypes.bfloat16)
    parts = {"weight_packed": packed(quants + 128, 1, bits=8), "weight_scale": scales, "weight_shape": np.array(shape)}
    return parts, quants * grouped(scales, shape[1])


def plain(kind: str, scale_shape: Callable[[tuple[int, int]], tuple[int, ...]], scale_name: str = "weight_scale"):
    def make(rng: np.random.Generator, shape: tuple[int, int]) -> Made:
        scales = rng.uniform(0.001, 0.003, scale_shape(shape)).astype(np.float32)
        if kind == "int":
            quants = rng.integers(-128, 128, shape, np.int8)
        else:  # subnormals too
            quants = (rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 7, shape)).astype(ml_dtypes.float8_e4m3fn)
        whole = np.ones(shape, np.float32)
        if scale_name == "weight_scale_inv":
            for row in range(shape[0]):
                for column in range(shape[1]):
                    whole[row, column] = scales[row // 96, column // 96]
        else:
            whole *= scales.reshape(-1, 1) if scales.ndim < 2 else grouped(scales, shape[1])
        return {"weight": quants, scale_name: scales}, quants.astype(np.float32) * whole

    return make


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "strategy": "channel", "symmetric": True} | weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
FORMATS: dict[str, tuple[Callable[[np.random.Generator, tuple[int, int]], Made], dict[str, Any]]] = {
    "awq": (awq, AWQ),
    "gptq": (gptq(1), GPTQ),
    "gptq_v2": (gptq(0), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq symmetric": (gptq(1, symmetric=True), GPTQ | {"sym": True}),
    "packed 4": (packed_four_bits(symmetric=True), compressed("pack-quantized", num_bits=4, strategy="group")),
    "packed 4 zeros": (packed_four_bits(symmetric=False), compressed("pack-quantized", num_bits=4, symmetric=False)),
    "packed 8": (packed_eight_bits, compressed("pack-quantized", num_bits=8)),
    "int8 rows": (plain("int", lambda shape: (shape[0], 1)), compressed("int-quantized", num_bits=8)),
    "int8 groups": (plain("int", lambda shape: (shape[0], shape[1] // 32)), compressed("int-quantized", num_bits=8)),
    "fp8 rows": (
        plain("float", lambda shape: (shape[0], 1)),
        compressed("float-quantized", num_bits=8, type="float"),
    ),
    "fp8 one": (
        plain("float", lambda shape: (1,)),
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    ),
    "fp8 blocks": (
        plain("float", lambda shape: (-(-shape[0] // 96), -(-shape[1] // 96)), "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [96, 96]},
    ),
}


def write_quantized(golden: Path, to: Path, make, config: Mapping[str, Any], change=None) -> dict[str, np.ndarray]:
    """The golden Llama with every matrix of its layers quantized; the values of each, by name."""
    rng = np.random.default_rng(5)
    values: dict[str, np.ndarray] = {}

    def tensors(dense: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        stored = {}
        for name, tensor in dense.items():
            if "_proj" not in name:
                stored[name] = tensor
                continue
            parts, values[name] = make(rng, tensor.shape)
            stored |= {f"{name.removesuffix('weight')}{part}": array for part, array in parts.items()}
        return change(stored) if change else stored

    copy_case(golden / "llama", to, config={"quantization_config": dict(config)}, tensors=tensors)
    return values


def weight_of(model, name: str) -> tuple[BlockQuantWeight, int]:
    """The stack that has a Hugging Face tensor, and its layer."""
    _, _, layer, group, part, _ = name.split(".")
    tree = model.params["layers"]["attention" if group == "self_attn" else "mlp"]
    return tree[part.removesuffix("_proj")]["weight"], int(layer)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("case", FORMATS)
def test_every_format_has_the_values_of_its_definition(golden: Path, tmp_path: Path, case: str, width: int) -> None:
    make, config = FORMATS[case]
    values = write_quantized(golden, tmp_path, make, config)
    model = load_model(tmp_path, tensor_parallel=width)
    assert load_model(tmp_path).spread(width).fingerprint == model.fingerprint
    for name, expected in values.items():
        weight, layer = weight_of(model, name)
        assert isinstance(weight, BlockQuantWeight)
        got = np.asarray(dequantize(jax.device_get(weight), jnp.float32))[layer]
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7, err_msg=name)
    assert isinstance(model.params["embedding"]["weight"], DenseWeight)


def refusal_of(path: Path) -> str:
    with pytest.raises(JaxkvError) as refusal:
        load_model(path)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes', implemented are awq"),
        ({"bits": 4}, "quantization_config has no quant_method"),
        (AWQ | {"version": "gemv"}, "version='gemv'"),
        (AWQ | {"bits": 8}, "bits=8"),
        (AWQ | {"rotation": "hadamard"}, "rotation='hadamard'"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic="),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        (compressed("pack-quantized", num_bits=3), "are int of 3 bits"),
        (compressed("pack-quantized", num_bits=4, actorder="group"), "actorder='group'"),
        (compressed("int-quantized", num_bits=8, symmetric=False), "symmetric False"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "format 'nvfp4-pack-quantized'"),
        (compressed("int-quantized", num_bits=8) | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme="),
        (compressed("int-quantized", num_bits=8) | {"config_groups": {"a": {}, "b": {}}}, "has 2 config_groups"),
        (GPTQ, "has no qweight of type I32"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(golden: Path, tmp_path: Path, config, named: str) -> None:
    copy_case(golden / "llama", tmp_path, config={"quantization_config": config})
    assert named in refusal_of(tmp_path)


def test_inputs_in_the_order_of_their_activations_are_refused_with_the_remedy(golden: Path, tmp_path: Path) -> None:
    write_quantized(golden, tmp_path, gptq(1, activation_order=True), GPTQ | {"desc_act": True})
    message = refusal_of(tmp_path)
    assert "model.layers.0" in message
    assert message.endswith("desc_act false")


def test_zero_points_that_contradict_a_symmetric_configuration_are_named(golden: Path, tmp_path: Path) -> None:
    write_quantized(golden, tmp_path, gptq(1), GPTQ | {"sym": True})
    assert "zero points other than 8" in refusal_of(tmp_path)


def test_layers_with_scales_of_different_types_are_named(golden: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.scales"
    write_quantized(
        *(golden, tmp_path, gptq(1), GPTQ),
        lambda tensors: tensors | {name: tensors[name].astype(ml_dtypes.bfloat16)},
    )
    message = refusal_of(tmp_path)
    assert "model.layers.1.mlp.up_proj.weight is quantized with scales float32 in 2 groups" in message
    assert "model.layers.0.mlp.up_proj.weight with scales float16 in 2 groups" in message


def test_a_missing_part_and_a_stray_one_are_named(golden: Path, tmp_path: Path) -> None:
    def without_scales(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        del tensors["model.layers.1.mlp.up_proj.scales"]
        return tensors

    write_quantized(golden, tmp_path / "missing", awq, AWQ, without_scales)
    assert "lacks model.layers.1.mlp.up_proj.scales" in refusal_of(tmp_path / "missing")
    write_quantized(golden, tmp_path / "stray", awq, AWQ, lambda tensors: tensors | {"table": np.zeros(2, np.int32)})
    assert "table is stored as I32 and is no part of a matrix" in refusal_of(tmp_path / "stray")


def test_a_weight_that_is_not_a_number_and_scales_that_do_not_fit_are_named(golden: Path, tmp_path: Path) -> None:
    make, config = FORMATS["fp8 rows"]
    name = "model.layers.0.mlp.down_proj"

    def with_nan(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors[f"{name}.weight"][3, 5] = np.nan
        return tensors

    write_quantized(golden, tmp_path / "nan", make, config, with_nan)
    assert f"{name}.weight has a weight that is not a number" in refusal_of(tmp_path / "nan")

    def with_few(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return tensors | {f"{name}.weight_scale": np.ones((7, 1), np.float32)}

    write_quantized(golden, tmp_path / "few", make, config, with_few)
    assert f"{name}.weight has [7, 1] scales for 64 x" in refusal_of(tmp_path / "few")


def test_a_quantized_model_is_known_by_its_configuration_file(golden: Path, tmp_path: Path) -> None:
    write_quantized(golden, tmp_path, awq, AWQ)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "is stored as I32" in refusal_of(tmp_path)
