"""How the vendors' libraries are found, asked what they have, and loaded."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kv_kernels.aiter.library import JaxAiter
from kv_kernels.flashinfer.calls import Modules
from kv_kernels.provider import KernelNeeds
from kv_kernels.selection import choose_provider

TARGETS = ("AppendKvJA", "PagedPrefillJA", "PagedAttentionJA")
ROCM = KernelNeeds("rocm", "bfloat16", num_heads=32, num_kv_heads=8, head_dim=128, tokens_per_page=16)


class FakeJaxAiter:
    """An installed jax-aiter (jax_aiter.ffi.registry and jax_aiter.kv.pa_config) in which `available` was built."""

    def __init__(self, monkeypatch, available) -> None:
        self.registered, self.configured = [], {}
        registry, pa_config = ModuleType("jax_aiter.ffi.registry"), ModuleType("jax_aiter.kv.pa_config")
        registry.standalone_symbol_available = lambda target: target in available
        registry.register_ffi_target = lambda target, platform: self.registered.append((target, platform))
        pa_config.make_config = lambda **config: self.configured.update(config) or "config"
        pa_config.func_name = lambda config: f"name of {config}"
        pa_config.max_num_partitions = lambda max_seq_len: -(-max_seq_len // 256)
        pa_config.workspace_bytes = lambda rows, heads, head_dim, max_seq_len, dtype: rows * heads * head_dim
        kv = ModuleType("jax_aiter.kv")
        kv.pa_config = pa_config
        for module in (ModuleType("jax_aiter"), ModuleType("jax_aiter.ffi"), registry, kv, pa_config):
            monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("missing", [TARGETS[:1], TARGETS[1:]])
def test_a_jax_aiter_without_some_kernel_is_asked_and_passed_over(monkeypatch, missing):
    FakeJaxAiter(monkeypatch, set(TARGETS) - set(missing))
    chosen = choose_provider(ROCM)
    assert chosen.provider.name == "pallas"
    assert f"not aiter: jax-aiter has no {', '.join(missing)}; build them" in chosen.reason


def test_a_jax_aiter_with_every_kernel_is_taken(monkeypatch):
    library = FakeJaxAiter(monkeypatch, TARGETS)
    assert choose_provider(ROCM).provider.name == "aiter"
    assert library.registered == [], "its libraries are opened by the first call that is traced"
    JaxAiter().register("AppendKvJA")
    assert library.registered == [("AppendKvJA", "ROCM")]


def test_aiter_is_asked_for_the_decode_kernel_of_the_step(monkeypatch):
    library = FakeJaxAiter(monkeypatch, TARGETS)
    query = jax.ShapeDtypeStruct((4, 32, 128), jnp.bfloat16)
    kernel = JaxAiter().decode_kernel(query=query, kv_heads=8, tokens_per_page=16, max_seq_len=600)
    assert kernel == ("name of config", 3, 4 * 32 * 128)
    assert library.configured == {
        **{"gqa_ratio": 4, "head_size": 128, "max_seq_len": 600, "block_size": 16},
        "dtype": np.dtype("bfloat16"),
    }


# Modules as FlashInfer's are built: C++ behind tvm-ffi's calling convention, over memory of the host.
PAGE = """
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <cstring>
using tvm::ffi::TensorView;

void Append(TensorView key, TensorView value, TensorView batch, TensorView position, TensorView k_pool,
            TensorView v_pool, TensorView pages, TensorView indptr, TensorView last_page_len, int64_t layout) {
  auto at = [](TensorView of, int64_t index) { return static_cast<const int32_t*>(of.data_ptr())[index]; };
  int64_t bytes = key.size(1) * key.size(2) * sizeof(uint16_t);
  auto copy = [&](TensorView pool, int64_t slot, TensorView from, int64_t token) {
    std::memcpy(static_cast<char*>(pool.data_ptr()) + slot * bytes,
                static_cast<const char*>(from.data_ptr()) + token * bytes, bytes);
  };
  for (int64_t token = 0; token < key.size(0); ++token) {
    int64_t page = at(pages, at(indptr, at(batch, token)));
    copy(k_pool, page * k_pool.size(1) + at(position, token), key, token);
    copy(v_pool, page * v_pool.size(1) + at(position, token), value, token);
  }
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(append_paged_kv_cache, Append);
"""
DECODE = """
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <cstring>
using tvm::ffi::Array;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

Array<int64_t> Plan(TensorView floats, TensorView ints, TensorView pinned, TensorView indptr, int64_t batch_size,
                    int64_t heads, int64_t kv_heads, int64_t page_size, bool cuda_graph, int64_t window_left,
                    double soft_cap, int64_t head_dim_qk, int64_t head_dim_vo, TensorView q_data, TensorView kv_data) {
  static_cast<uint8_t*>(pinned.data_ptr())[0] = 77;
  return {batch_size, heads, kv_heads, page_size, cuda_graph, window_left, head_dim_qk, floats.size(0) >= 128 << 20};
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, Plan);

// Every query, if all that came with it is what was planned.
void Run(TensorView floats, TensorView ints, Array<int64_t> plan_info, TensorView q, TensorView k_pool,
         TensorView v_pool, TensorView indptr, TensorView indices, TensorView last_page_len, TensorView out,
         Optional<TensorView> lse, int64_t layout, int64_t window_left, bool pdl, Optional<TensorView> alibi_slopes,
         double soft_cap, double scale, double rope_rcp_scale, double rope_rcp_theta) {
  bool expected = static_cast<const uint8_t*>(ints.data_ptr())[0] == 77 && plan_info[0] == indptr.size(0) - 1 &&
                  plan_info[1] == q.size(1) && !lse.has_value() && !alibi_slopes.has_value() && scale == 0.25;
  if (expected) std::memcpy(out.data_ptr(), q.data_ptr(), q.size(0) * q.size(1) * q.size(2) * sizeof(uint16_t));
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, Run);
"""
USE = """
import sys
sys.modules["torch"] = None  # whoever imports it fails
import jax, jax.numpy as jnp, numpy as np
from paged_case import make_case
from kv_kernels.flashinfer import FlashInferProvider
from kv_kernels.flashinfer.library import PrebuiltModules
from kv_kernels.provider import KernelNeeds, PlanShape, PoolPair, Scoring

class OfTheHost(PrebuiltModules):
    platform, in_command_buffers, owned_tensors = "cpu", False, True

provider = FlashInferProvider(KernelNeeds("cuda", "float16", 4, 2, 64, 16), OfTheHost())
assert provider.unsupported(provider.needs) is None
new = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 64)), "float16")
pools = PoolPair(*(jnp.zeros((4, 16, 2, 64), "float16") for _ in range(2)))
k, v = jax.jit(provider.append_kv)(new, -new, jnp.asarray([17, 40, 16], jnp.int32), pools)
expected = np.zeros((64, 2, 64), np.float16)
expected[[17, 40, 16]] = new
np.testing.assert_array_equal(k.reshape(expected.shape), expected)
np.testing.assert_array_equal(v.reshape(expected.shape), -expected)

case = make_case(0, kv_len=[20, 3], query_len=[1, 1], heads=4, kv_heads=2, head_dim=64, dtype="float16", fill=0.0)
plan = provider.plan(case.table, PlanShape(2, 2, 8))
assert plan.static.plan_info == (2, 4, 2, 16, 1, -1, 64, 1), plan.static
q = jnp.asarray(case.q, "float16")
attend = jax.jit(lambda *args: provider.paged_attention(*args, first_page=0, scoring=Scoring(np.float32(0.25))))
np.testing.assert_array_equal(attend(q, case.pools, plan), q)
"""


@pytest.fixture
def modules(tmp_path) -> Path:
    """A folder of prebuilt modules: page, batch prefill (empty) and batch decode."""
    pytest.importorskip("jax_tvm_ffi", reason="modules are built against tvm-ffi, which is not installed")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    from tvm_ffi import libinfo

    names = Modules("float16", 64, window=False, soft_cap=False)
    library = Path(libinfo.find_libtvm_ffi())
    for name, source in (("page", PAGE), (names.prefill, ""), (names.decode, DECODE)):
        built = tmp_path / name / f"{name}.so"
        built.parent.mkdir()
        includes = {f"-I{place}" for place in (libinfo.find_include_path(), libinfo.find_dlpack_include_path())}
        command = [compiler, "-std=c++17", "-shared", "-fPIC", *includes, "-x", "c++", "-", "-o", str(built)]
        command += [f"-L{library.parent}", "-ltvm_ffi", f"-Wl,-rpath,{library.parent}"]
        subprocess.run(command, input=source, text=True, check=True)
    return tmp_path


def test_prebuilt_modules_are_loaded_planned_with_and_called_without_torch(modules):
    tests = Path(__file__).resolve().parents[1]
    path = ":".join([*map(str, (tests.parent, tests, tests / "kernels")), *filter(None, sys.path)])
    environment = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAXKV_FLASHINFER_MODULES": str(modules)}
    ended = subprocess.run([sys.executable, "-c", USE], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
