"""Memory while a checkpoint loads: little beyond what stays."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.random_llama import write_random_llama
from models import load_model, stack_reader
from models.safetensors_loader import SafetensorsCheckpoint

# The peak is counted from where it is reset: what importing and starting jax needs is none of the checkpoint's.
MEASURE = """
import sys
import jax
from models import load_model
def status(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) * 1024
jax.numpy.zeros(3).block_until_ready()
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
model = load_model(sys.argv[1], dtype=sys.argv[2])
print(status("VmHWM") - before)
"""


def write_bf16_shards(directory: Path, count: int = 4) -> int:
    """A checkpoint of one vocabulary and eight layers over `count` files; its bytes."""
    write_random_llama(directory, layers=8, hidden=768, vocab_size=16384, num_attention_heads=12, head_dim=64)
    single = directory / "model.safetensors"
    tensors = sorted(load_file(single).items())
    single.unlink()
    weight_map, size = {}, 0
    for shard in range(count):
        name = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        part = {key: tensor.astype(ml_dtypes.bfloat16) for key, tensor in tensors[shard::count]}
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
        size += sum(tensor.nbytes for tensor in part.values())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return size


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak is read from Linux's /proc")
def test_a_sharded_bf16_checkpoint_loads_below_a_fifth_more_than_its_bytes(tmp_path: Path, dtype: str) -> None:
    size = write_bf16_shards(tmp_path)
    assert size > 100e6
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    child = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path), dtype],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert int(child.stdout) < 1.2 * size


def test_a_tensor_is_read_a_part_at_a_time_and_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_random_llama(tmp_path, layers=2)
    whole = load_model(directory)
    read, sizes = SafetensorsCheckpoint.read, []

    def counted(self: SafetensorsCheckpoint, name: str, index=None) -> np.ndarray:
        tensor = read(self, name, index)
        sizes.append(tensor.size)
        return tensor

    monkeypatch.setattr(SafetensorsCheckpoint, "read", counted)
    monkeypatch.setattr(stack_reader, "_CHUNK_NUMBERS", 100)
    parts = load_model(directory)
    assert max(sizes) <= 100
    for ours, theirs in zip(jax.tree.leaves(parts.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
