"""Our own CPU kernels, in C++ through the XLA FFI.

The package's build makes the library beside this file, so nothing is compiled at run time; where it was not built, or
cannot run, the provider says why and another is chosen.
"""

from kv_kernels.native.library import LEVELS, NativeUnavailableError, load_library
from kv_kernels.native.provider import NativeProvider

__all__ = ["LEVELS", "NativeProvider", "NativeUnavailableError", "load_library"]
