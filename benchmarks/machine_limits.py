"""What the machine itself can do: bytes read and multiply-adds done in a second, by loops that are no engine's.

Each limit is measured in more than one way and is the best of them: numpy's own BLAS always, and two short C loops
where there is a compiler (reads with nothing else, and multiply-adds that never leave the registers). Matrix tiles and
vectors of pairs multiply bfloat16 faster than float32, and vectors of bytes are faster still: limits of their own. All
threads work at once, and a read is timed over as many bytes as a step of the model reads, so that caches that help a
step help the limit too.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

MATRIX = 2048
FMA_ROUNDS = 50_000_000
FMA_CHAINS = 12
TILE_ROUNDS = 2_000_000
VECTOR_ROUNDS = 50_000_000
BLAS_SPINS_S = 0.1  # and more, after a product: its threads would take a core from what is measured next

SOURCE = """
#include <stddef.h>
#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
typedef float lanes __attribute__((vector_size(BYTES)));

int lane_count(void) { return BYTES / sizeof(float); }

float read_all(const float *from, size_t count) {
  lanes sums[8] = {0};
  const lanes *at = (const lanes *)from;
  for (size_t i = 0; i + 8 <= count / (BYTES / sizeof(float)); i += 8)
    for (int j = 0; j < 8; ++j) sums[j] += at[i + j];
  for (int j = 1; j < 8; ++j) sums[0] += sums[j];
  return sums[0][0];
}

float multiply_add(long rounds, float seed) {
  lanes a[12], scale = {0}, shift = {0};
  scale = scale + seed; shift = shift + (1.0f - seed);
  for (int j = 0; j < 12; ++j) a[j] = shift * (float)j;
  for (long i = 0; i < rounds; ++i)
    for (int j = 0; j < 12; ++j) a[j] = a[j] * scale + shift;
  for (int j = 1; j < 12; ++j) a[0] += a[j];
  return a[0][0];
}

/* The same in bfloat16, in tiles and in vectors of pairs: the operations done, or 0 where there are none. */
#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
double tile_multiply_add(long rounds) {
  struct { unsigned char palette, start, reserved[14]; unsigned short width[16]; unsigned char rows[16]; } shape = {1};
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return 0;
  for (int j = 0; j < 8; ++j) shape.width[j] = 64, shape.rows[j] = 16;
  __asm__ volatile("ldtilecfg %0" : : "m"(shape));
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  _tile_zero(4); _tile_zero(5); _tile_zero(6); _tile_zero(7);
  for (long i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 4.0 * 2 * 16 * 16 * 32 * (double)rounds;
}
#else
double tile_multiply_add(long rounds) { (void)rounds; return 0; }
#endif
#if defined(__AVX512BF16__)
double pair_multiply_add(long rounds) {
  __m512 a[12];
  __m512i x = _mm512_set1_epi16(0x3f00), y = x;
  for (int j = 0; j < 12; ++j) a[j] = _mm512_set1_ps((float)j);
  for (long i = 0; i < rounds; ++i) {
    __asm__ volatile("" : "+v"(x), "+v"(y)); /* or the compiler would do one round */
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) a[j] = _mm512_dpbf16_ps(a[j], (__m512bh)x, (__m512bh)y);
  }
  for (int j = 0; j < 12; ++j) __asm__ volatile("" : : "v"(a[j]));
  return 12.0 * 2 * 32 * (double)rounds;
}
#else
double pair_multiply_add(long rounds) { (void)rounds; return 0; }
#endif

/* The same of bytes, summed in integers of 32 bits. */
#if defined(__AVX512VNNI__)
#include <immintrin.h>
double byte_multiply_add(long rounds) {
  __m512i a[12], x = _mm512_set1_epi8(3), y = x;
  for (int j = 0; j < 12; ++j) a[j] = _mm512_set1_epi32(j);
  for (long i = 0; i < rounds; ++i) {
    __asm__ volatile("" : "+v"(x), "+v"(y));
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) a[j] = _mm512_dpbusd_epi32(a[j], x, y);
  }
  for (int j = 0; j < 12; ++j) __asm__ volatile("" : : "v"(a[j]));
  return 12.0 * 2 * 64 * (double)rounds;
}
#else
double byte_multiply_add(long rounds) { (void)rounds; return 0; }
#endif
"""
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")


def dtype_of(kind: str) -> str:
    """What a kind of limit, by the name of its method, is about."""
    return {"bf16": "bfloat16", "int8": "int8"}.get(kind.partition("_")[0], "float32")


class MachineLimits:
    """Measures on request, so that the machine takes its turns beside the engines."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._buffer = np.empty(0, np.float32)
        self._matrix = np.ones((MATRIX, MATRIX), np.float32)
        self._loops = compiled_loops()

    def read_bandwidth(self, read_bytes: int) -> dict[str, float]:
        """Bytes per second by method, reading the same `read_bytes` over and over for a while."""
        if self._buffer.nbytes < read_bytes:
            self._buffer = np.ones(read_bytes // 4, np.float32)
        parts = np.array_split(self._buffer[: read_bytes // 4], self._threads)
        calls: dict[str, Callable[[np.ndarray], object]] = {"blas": lambda part: np.dot(part, part)}
        if (loops := self._loops) is not None:
            calls["loop"] = lambda part: loops.read_all(part.ctypes.data, part.size)
        repeats = max(2, (1 << 30) // read_bytes)
        found = {}
        for name, call in calls.items():

            def work(part: np.ndarray, call: Callable[[np.ndarray], object] = call) -> None:
                for _ in range(repeats):
                    call(part)

            found[name] = repeats * read_bytes / self._seconds(work, parts)
            time.sleep(BLAS_SPINS_S)
        return found

    def multiply_adds(self) -> dict[str, float]:
        """Floating-point operations per second in float32 by method, two for each multiply-add."""
        start = time.perf_counter()
        np.dot(self._matrix, self._matrix)
        found = {"blas": 2 * MATRIX**3 / (time.perf_counter() - start)}
        time.sleep(BLAS_SPINS_S)
        if (loops := self._loops) is not None:
            seconds = self._seconds(lambda _: loops.multiply_add(FMA_ROUNDS, 0.5), [None] * self._threads)
            found["loop"] = 2 * FMA_ROUNDS * FMA_CHAINS * loops.lane_count() * self._threads / seconds
        return found

    def bf16_multiply_adds(self) -> dict[str, float]:
        """The same in bfloat16, in matrix tiles and in vectors of pairs; empty where there are neither."""
        return self._operations({"tile": TILE_ROUNDS, "pair": VECTOR_ROUNDS})

    def int8_multiply_adds(self) -> dict[str, float]:
        """The same of bytes, in vectors; empty where there are none."""
        return self._operations({"byte": VECTOR_ROUNDS})

    def _operations(self, rounds_of: dict[str, int]) -> dict[str, float]:
        found = {}
        for name, rounds in rounds_of.items() if self._loops is not None else ():
            call = getattr(self._loops, f"{name}_multiply_add")
            if operations := call(rounds // 100) * 100:
                seconds = self._seconds(lambda _, call=call, rounds=rounds: call(rounds), [None] * self._threads)
                found[f"{name}s"] = operations * self._threads / seconds
        return found

    def _seconds(self, work: Callable[[object], object], parts: list) -> float:
        start = time.perf_counter()
        list(self._pool.map(work, parts))
        return time.perf_counter() - start


def compiled_loops() -> ctypes.CDLL | None:
    """The C loops, compiled for this very machine; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "loops.c", Path(folder) / "loops.so"
        source.write_text(SOURCE)
        done = subprocess.run([compiler, *FLAGS, str(source), "-o", str(library)], capture_output=True, check=False)
        if done.returncode:
            return None
        loops = ctypes.CDLL(str(library))
    loops.read_all.restype = loops.multiply_add.restype = ctypes.c_float
    loops.read_all.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    for call in (loops.tile_multiply_add, loops.pair_multiply_add, loops.byte_multiply_add):
        call.restype, call.argtypes = ctypes.c_double, (ctypes.c_long,)
    loops.multiply_add.argtypes = (ctypes.c_long, ctypes.c_float)
    return loops
