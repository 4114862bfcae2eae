"""The adapters of a running engine: names, the slots that they share by content, and the parameters they are in.

A name stands for a content, and a content is in one slot however many names it has. Requests keep the slot that they
began with: a name may go, or come to stand for something else, while they run; the slot is dealt again when no name and
no request is left. Nothing compiles when an adapter comes or goes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from kv_common.errors import JaxkvError
from kv_execution.protocols import AdaptableModel
from kv_kernels.adapters import NO_ADAPTER


class AdapterNameError(JaxkvError):
    """A name that stands for no adapter, or that cannot."""


class NoFreeAdapterSlotError(JaxkvError):
    """Every slot is taken, by a name or by a request that has not ended."""


class AdapterChoice(NamedTuple):
    """What a request runs with: a slot, and the digest of its content, which its K/V is cached under."""

    slot: int
    fingerprint: bytes | None


WITHOUT = AdapterChoice(NO_ADAPTER, None)


class Adapters:
    """Adapters by name. `slots_in_use` says which slots requests have that have not ended; `changed` takes the
    parameters whenever they are new.
    """

    def __init__(
        self,
        model: AdaptableModel | None,
        slots_in_use: Callable[[], Collection[int]],
        changed: Callable[[Any], None],
    ) -> None:
        self._model = model
        self._slots_in_use = slots_in_use
        self._changed = changed
        self._params = None if model is None else model.params
        self._names: dict[str, bytes] = {}
        self._contents: list[bytes | None] = [] if model is None else [None] * model.capacity.slots

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may give."""
        return tuple(self._names)

    def load(self, name: str, directory: str | Path) -> None:
        """Let `name` stand for the PEFT LoRA adapter in `directory`; what it stood for stays with those who run.

        Raises AdapterNameError for an empty name, or where the engine has no room for adapters, and
        NoFreeAdapterSlotError; and what reading the adapter raises. Nothing has changed then.
        """
        if not isinstance(name, str) or not name:
            raise AdapterNameError(f"an adapter's name is {name!r}; give some text")
        if self._model is None:
            raise AdapterNameError(
                f"there is no room for adapter {name!r}: make the engine with EngineConfig(max_adapters=...)"
            )
        adapter = self._model.read_adapter(directory)
        if adapter.fingerprint not in self._contents:
            slot = self._free_slot(name)
            self._params = self._model.with_adapter(self._params, slot, adapter)
            self._contents[slot] = adapter.fingerprint
            self._changed(self._params)
        self._names[name] = adapter.fingerprint

    def unload(self, name: str) -> None:
        """Forget a name; requests that run with it go on. Raises AdapterNameError."""
        self.choice(name)
        del self._names[name]

    def choice(self, name: str | None) -> AdapterChoice:
        """What a request of this name runs with. Raises AdapterNameError for an unknown one."""
        if name is None:
            return WITHOUT
        if name not in self._names:
            known = ", ".join(map(repr, self._names)) or "none"
            raise AdapterNameError(f"no adapter is called {name!r}; loaded are: {known}")
        return AdapterChoice(self._contents.index(self._names[name]), self._names[name])

    def _free_slot(self, name: str) -> int:
        named = {content for other, content in self._names.items() if other != name}
        in_use = self._slots_in_use()
        for slot, content in enumerate(self._contents):
            if slot not in in_use and content not in named:
                return slot
        raise NoFreeAdapterSlotError(
            f"all {len(self._contents)} adapter slots are taken, none for {name!r}: unload one and let its requests "
            "end, or raise max_adapters"
        )
