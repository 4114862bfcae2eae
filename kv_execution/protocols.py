"""What the engine asks of a model: sizes, parameters and one pure function. Any object that has these will do."""

from pathlib import Path
from typing import Any, Protocol

from kv_common.model_spec import ModelSpec
from kv_kernels.adapters import AdapterCapacity
from kv_kernels.tensor_parallel import TensorMesh


class CausalModel(Protocol):
    """A decoder whose K/V lives in the pools of the view it is given."""

    @property
    def spec(self) -> ModelSpec:
        """Sizes of the model."""

    @property
    def fingerprint(self) -> bytes:
        """Digest of everything that its K/V depends on: weights and configuration, by content."""

    @property
    def params(self) -> Any:
        """A pytree of device arrays, placed on `tensor_mesh` where there is one."""

    @property
    def tensor_mesh(self) -> TensorMesh | None:
        """The devices that the parameters are spread over; None for one device."""

    def spread(self, tensor_parallel: int) -> "CausalModel":
        """The same model over so many devices. Raises a JaxkvError where that cannot be."""

    @property
    def forward(self) -> Any:
        """`forward(params, token_ids [tokens], step, logit_rows [rows]) -> (x [rows, hidden], step)`, pure; x is what
        the output product takes.
        """

    @property
    def logits(self) -> Any:
        """`logits(params, x [rows, hidden], products) -> logits [rows, vocab] f32`, pure; `products` are
        `OutputProducts`.
        """

    @property
    def most_likely(self) -> Any:
        """`most_likely(params, x [rows, hidden], products) -> tokens [rows] i32`, those of the largest of `logits`, the
        first of equals; pure.
        """

    @property
    def hidden(self) -> Any:
        """`hidden(params, token_ids [tokens], step) -> (final hidden states [tokens, hidden] f32, step)`, pure."""

    @property
    def classify(self) -> Any:
        """`classify(params, hidden [rows, hidden] f32) -> scores [rows, labels] f32`, pure; of a model with labels."""

    @property
    def with_adapters(self) -> Any:
        """`with_adapters(slots, rank) -> AdaptableModel`: the same with room for adapters. Asked for only where an
        engine is to have them.
        """


class Adapter(Protocol):
    """An adapter in memory."""

    @property
    def fingerprint(self) -> bytes:
        """Digest of its content."""


class AdaptableModel(CausalModel, Protocol):
    """A model with room for adapters in its parameters; `forward` is given a step with a mask of them."""

    @property
    def capacity(self) -> AdapterCapacity:
        """The room there is."""

    def read_adapter(self, directory: str | Path) -> Any:
        """The adapter in a directory, an `Adapter`. Raises a JaxkvError where it does not fit."""

    def with_adapter(self, params: Any, slot: int, adapter: Any) -> Any:
        """`params` with an adapter in a slot; of the same shapes."""
