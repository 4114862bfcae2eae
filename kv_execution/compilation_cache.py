"""JAX's compilation cache on disk, on by default: what one process has compiled the next one only loads.

jax has one cache for the whole process, so a folder that the user has chosen (by `jax.config`, or by
JAX_COMPILATION_CACHE_DIR) stays as it is, limits and all, and JAX_ENABLE_COMPILATION_CACHE=false turns every cache off.
A cache only saves time: one that cannot be used is a line in the log, and damaged entries are deleted, since jax itself
would read them again in every process.
"""

import contextlib
import logging
import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

logger = logging.getLogger(__name__)

_FAULT = re.compile(r"Error (?:reading|writing) persistent compilation cache entry for '([^']*)'")


def default_cache_folder() -> Path:
    """`jaxkv/compilation` in the platform's folder for what an application can make again."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = "~/.cache"
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    # A relative one is to be ignored, says its specification.
    return Path(chosen if os.path.isabs(chosen) else os.path.expanduser(base)) / "jaxkv" / "compilation"


def use_compilation_cache() -> None:
    """Keep what this process compiles in `default_cache_folder()`, unless the user has settled where, or that not."""
    if _setting("jax_compilation_cache_dir") or not _setting("jax_enable_compilation_cache"):
        return
    folder = default_cache_folder()
    try:
        # For the user alone: whoever can write an entry can run code in a process that loads it.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        logger.warning("no compilation cache: %s cannot be written (%s)", folder, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # jax keeps what took a second to compile; a model has dozens of programs that take less.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _setting(name: str) -> Any:
    # jax documents these as attributes, which it makes at run time.
    return getattr(jax.config, name)


class _Catcher:
    """Records jax's warnings about the cache for several threads, each of which may begin and end when it likes.

    Filters of warnings are the whole process's, so every other warning goes on to whom it would have reached: raised
    here it would end a step, whichever thread it came from.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._faults: list[str] = []
        self._undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[str]]:
        """Yields a list, which has what came when all are out; so it has nothing where others are still inside."""
        ended: list[str] = []
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._faults = []
                self._undo.enter_context(warnings.catch_warnings())
                self._record_faults()
        try:
            yield ended
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._undo.close()
                    ended += self._faults

    def _record_faults(self) -> None:
        faults, show = self._faults, warnings.showwarning

        def record(message: Warning | str, *where: Any, **more: Any) -> None:
            fault = _FAULT.match(str(message))
            if fault is None:
                show(message, *where, **more)
            else:
                faults.append(fault[1])

        warnings.filterwarnings("always", _FAULT.pattern)
        warnings.showwarning = record


_catcher = _Catcher()


@contextlib.contextmanager
def reporting_cache_faults() -> Iterator[None]:
    """Around whatever may compile, on any thread: jax's warnings about the cache become one line, and what was damaged
    is deleted.
    """
    with _catcher.recording() as faults:
        yield
    programs = sorted(set(faults))
    folder = _setting("jax_compilation_cache_dir")
    if programs and folder:
        # Only in the folder that is ours: what a user's own has is the user's.
        ours = folder == str(default_cache_folder())
        for entry in (entry for program in programs if ours for entry in Path(folder).glob(f"{program}-*")):
            with contextlib.suppress(OSError):
                entry.unlink()
        logger.warning(
            "the compilation cache in %s failed for %s, which was compiled anew", folder, ", ".join(programs)
        )
