"""A model spread over devices is read slice by slice, and is the same model."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from model_files import copy_case, write_gguf

from benchmarks.random_llama import write_random_llama
from kv_kernels.tensor_parallel import KV_HEAD_REPLICA, KV_HEAD_SHARD, TensorParallelError
from kv_kernels.weights import BlockQuantWeight, tiled, untiled
from models import load_model
from models.gguf_loader import GgufCheckpoint
from models.safetensors_loader import SafetensorsCheckpoint
from models.spreading import cut

TABLE = {
    "embedding.weight": (),
    "layers.attention.q.weight": (None, (KV_HEAD_SHARD, KV_HEAD_REPLICA), None),
    "layers.attention.k.weight": (None, (KV_HEAD_SHARD,), None),
    "layers.attention.v.weight": (None, (KV_HEAD_SHARD,), None),
    "layers.attention.o.weight": (None, None, (KV_HEAD_SHARD, KV_HEAD_REPLICA)),
    "layers.attention.q.bias": (None, (KV_HEAD_SHARD, KV_HEAD_REPLICA)),
    "layers.attention.k.bias": (None, (KV_HEAD_SHARD,)),
    "layers.attention.o.bias": (),
    "layers.attention_norm.weight": (),
    "layers.mlp.gate.weight": (None, (KV_HEAD_SHARD, KV_HEAD_REPLICA), None),
    "layers.mlp.up.weight": (None, (KV_HEAD_SHARD, KV_HEAD_REPLICA), None),
    "layers.mlp.down.weight": (None, None, (KV_HEAD_SHARD, KV_HEAD_REPLICA)),
    "norm.weight": (),
}


def leaves_by_path(params) -> dict[str, jax.Array]:
    return {
        ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def normalized(spec) -> tuple:
    """A spec with one way of writing an axis."""
    return tuple(names if names is None or isinstance(names, tuple) else (names,) for names in spec)


def test_every_parameter_goes_where_the_table_says(golden):
    model = load_model(golden / "llama_bias_tied", tensor_parallel=4)
    specs = {
        path.removesuffix(".values"): normalized(leaf.sharding.spec)
        for path, leaf in leaves_by_path(model.params).items()
    }
    assert {path: specs[path] for path in TABLE} == TABLE
    untied = leaves_by_path(load_model(golden / "llama", tensor_parallel=4).params)
    assert normalized(untied["output.weight.values"].sharding.spec) == ((KV_HEAD_SHARD, KV_HEAD_REPLICA), None)


@pytest.mark.parametrize("storage", ["F32", "Q8_0", "Q4_1"])
def test_the_slices_of_a_gguf_put_together_are_the_whole(storage, golden, tmp_path):
    path = write_gguf(golden / "llama", tmp_path / "tiny.gguf", storage=lambda name: storage)
    whole, spread = (load_model(path, tensor_parallel=width) for width in (1, 2))
    down = whole.params["layers"]["mlp"]["down"]["weight"]
    assert isinstance(down, BlockQuantWeight) == (storage != "F32")
    assert getattr(down, "in_tiles", False) == (storage == "Q4_1")  # which slices are not
    by_row = jax.tree.map(
        lambda leaf: untiled(leaf) if isinstance(leaf, BlockQuantWeight) else leaf,
        whole.params,
        is_leaf=lambda leaf: isinstance(leaf, BlockQuantWeight),
    )
    assert jax.tree.structure(by_row) == jax.tree.structure(spread.params)
    for expected, got in zip(jax.tree.leaves(by_row), jax.tree.leaves(spread.params), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_the_slices_of_a_checkpoint_put_together_are_the_whole(golden, tmp_path):
    for directory, dtype in ((golden / "llama", "bfloat16"), (golden / "llama_mqa", "float32")):
        whole, spread = (load_model(directory, dtype=dtype, tensor_parallel=width) for width in (1, 4))
        for expected, got in zip(jax.tree.leaves(whole.params), jax.tree.leaves(spread.params), strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("kind", [SafetensorsCheckpoint, GgufCheckpoint])
def test_every_slice_is_read_once_whoever_holds_it_and_nothing_else(kind, golden, tmp_path, monkeypatch):
    source = golden / "llama"
    if kind is GgufCheckpoint:
        source = write_gguf(source, tmp_path / "tiny.gguf")
    read, elements = kind.read, {}

    def counted(self, name, index=None):
        tensor = read(self, name, index)
        elements[name] = elements.get(name, 0) + tensor.size
        return tensor

    monkeypatch.setattr(kind, "read", counted)
    load_model(source, tensor_parallel=4)  # two shards of two replicas
    checkpoint = kind(source)
    assert elements == {name: int(np.prod(checkpoint.shape(name))) for name in checkpoint.names}


def test_no_more_than_a_slice_is_on_the_host_at_once(golden, monkeypatch):
    largest = 0
    put = jax.device_put

    def watched(leaf, *args):
        nonlocal largest
        if leaf.ndim == 3:
            largest = max(largest, leaf.nbytes)
        return put(leaf, *args)

    monkeypatch.setattr(jax, "device_put", watched)
    model = load_model(golden / "llama", tensor_parallel=2)
    stacks = [leaf for leaf in jax.tree.leaves(model.params) if leaf.ndim == 3]
    assert largest == max(leaf.nbytes for leaf in stacks) // 2


def test_a_block_that_would_be_cut_is_refused_before_anything_is_read(golden, tmp_path, monkeypatch):
    path = write_gguf(golden / "llama", tmp_path / "tiny.gguf", storage=lambda name: "Q8_0")
    monkeypatch.setattr(GgufCheckpoint, "read", None)
    with pytest.raises(TensorParallelError) as caught:
        load_model(path, tensor_parallel=4)
    assert str(caught.value) == (
        "layers.attention.o.weight has 64 inputs in blocks of 32, and 4 devices would hold 16 each, which cuts a "
        "block: choose another tensor_parallel, or a file that is not quantized"
    )


def test_slices_of_a_weight_in_tiles_may_cut_them():
    rng = np.random.default_rng(1)
    quants = rng.integers(0, 256, (2, 48, 48), np.uint8)
    scales, mins = rng.standard_normal((2, 2, 48, 3)).astype(np.float16)
    weight = BlockQuantWeight(quants, scales, mins, "q4_1")
    for rows in (slice(0, 48), slice(16, 32), slice(8, 24), slice(24, 25)):
        for columns in (slice(0, 96), slice(32, 96)):
            index = (slice(0, 2), rows, columns)
            jax.tree.map(np.testing.assert_array_equal, cut(tiled(weight), index), cut(weight, index))


def test_a_spread_model_is_known_by_its_content(golden, tmp_path):
    changed = copy_case(
        golden / "llama",
        tmp_path / "changed",
        tensors=lambda tensors: (
            tensors | {"model.layers.1.mlp.down_proj.weight": -tensors["model.layers.1.mlp.down_proj.weight"]}
        ),
    )
    same = copy_case(golden / "llama", tmp_path / "same")
    prints = [load_model(source, tensor_parallel=2).fingerprint for source in (golden / "llama", same, changed)]
    assert prints[0] == prints[1] != prints[2]


def test_a_replica_is_read_from_every_axis_of_a_larger_mesh(golden):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", KV_HEAD_SHARD, KV_HEAD_REPLICA))
    model = load_model(golden / "llama", tensor_parallel=mesh)
    key = model.params["layers"]["attention"]["k"]["weight"].values
    assert len(key.addressable_shards) == 8
    assert len({str(shard.index) for shard in key.addressable_shards}) == 2


def test_the_widths_that_fit_are_those_that_divide(tmp_path):
    directory = write_random_llama(tmp_path, layers=1, num_attention_heads=4, num_key_value_heads=2)
    for width in range(1, 9):
        if width in (1, 2, 4):
            assert load_model(directory, tensor_parallel=width).spec.num_heads == 4
        else:
            with pytest.raises(TensorParallelError, match=f"over {width} devices"):
                load_model(directory, tensor_parallel=width)
