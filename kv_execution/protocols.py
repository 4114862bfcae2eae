"""What the engine asks of a model: sizes, parameters and one pure function. Any object that has these will do."""

from typing import Any, Protocol

from kv_common.model_spec import ModelSpec
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
        """`forward(params, token_ids [tokens], step, logit_rows [rows]) -> (logits [rows, vocab] f32, step)`, pure."""
