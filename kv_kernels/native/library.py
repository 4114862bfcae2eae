"""The shared library of the native kernels: found, loaded once, its handlers registered with XLA.

The library has no Python ABI. It carries kernels for several instruction sets and takes the best that the CPU has;
`JAXKV_NATIVE_LEVEL` asks for a lower one, and `JAXKV_NATIVE_LIBRARY` for another build of the library.
"""

import ctypes
import functools
import importlib.util
import os

import jax

from kv_common.errors import JaxkvError

LEVELS = ("generic", "avx2", "avx512", "avx512_bf16", "amx")
"""Instruction sets that kernels may exist for, slowest first."""

LEVEL_VARIABLE = "JAXKV_NATIVE_LEVEL"
LIBRARY_VARIABLE = "JAXKV_NATIVE_LIBRARY"
TARGETS = (
    *("jaxkv_append_kv", "jaxkv_paged_attention", "jaxkv_attend", "jaxkv_linear", "jaxkv_normalize"),
    *("jaxkv_most_likely", "jaxkv_embed", "jaxkv_argmax", "jaxkv_zeros"),
)


class NativeUnavailableError(JaxkvError):
    """The native kernels were not built, or cannot run on this machine."""


class NativeLevelError(JaxkvError):
    """An instruction set is asked for that the CPU or the build does not have. Nothing else is taken in its place."""


class NativeLibrary:
    """The loaded library and its two settings, which hold for all calls that begin after they are made."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.jaxkv_level.restype = ctypes.c_char_p
        library.jaxkv_set_level.argtypes = [ctypes.c_char_p]
        library.jaxkv_set_threads.argtypes = [ctypes.c_int]

    @property
    def level(self) -> str:
        """The instruction set in use."""
        name: bytes = self._library.jaxkv_level()
        return name.decode()

    def set_level(self, level: str) -> None:
        """Use the kernels of `level`. Raises NativeLevelError where the CPU or the build has none."""
        if self._library.jaxkv_set_level(level.encode()):
            raise NativeLevelError(
                f"no native kernels for {level!r} on this CPU; use one of {', '.join(self.levels())}"
            )

    def levels(self) -> list[str]:
        """The instruction sets that this CPU can run, slowest first."""
        current, able = self.level.encode(), []
        for name in LEVELS:
            if not self._library.jaxkv_set_level(name.encode()):
                able.append(name)
        self._library.jaxkv_set_level(current)
        return able

    @property
    def has_int8_products(self) -> bool:
        """Whether that instruction set can multiply activations rounded to 8 bits, and gains by it."""
        return bool(self._library.jaxkv_has_int8_products())

    def set_threads(self, threads: int) -> None:
        """Use at most `threads` threads of XLA's pool; 0 for all of them."""
        self._library.jaxkv_set_threads(threads)


@functools.cache
def load_library() -> NativeLibrary:
    """The library, its handlers registered on first use.

    Raises NativeUnavailableError with the reason, or NativeLevelError for what `JAXKV_NATIVE_LEVEL` says.
    """
    path = os.environ.get(LIBRARY_VARIABLE) or _installed_library()
    try:
        shared = ctypes.CDLL(path)
    except OSError as error:
        raise NativeUnavailableError(f"the native kernels cannot be loaded: {error}; install again") from error
    library = NativeLibrary(shared)
    if level := os.environ.get(LEVEL_VARIABLE):
        library.set_level(level.lower())
    for target in TARGETS:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(shared, target)), platform="cpu")
    return library


def _installed_library() -> str:
    # Found as a module would be, since an editable install keeps it apart from the sources.
    spec = importlib.util.find_spec("kv_kernels.native._kernels")
    if spec is None or spec.origin is None:
        raise NativeUnavailableError("the native kernels were not built: install with a C++17 compiler at hand")
    return spec.origin
