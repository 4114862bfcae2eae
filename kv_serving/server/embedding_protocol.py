"""The body of /v1/embeddings, and the response to it."""

import base64
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kv_serving.server.completion_protocol import TokenIds, prompts_in
from kv_serving.server.errors import ApiError
from kv_serving.server.sampling_fields import RequestModel

MAX_INPUTS = 2048


class InputFields(RequestModel):
    """Texts, or token ids, of which each is pooled."""

    model: str | None = None
    input: str | TokenIds | list[str] | list[TokenIds]
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    deadline_s: Annotated[float, Field(allow_inf_nan=False, gt=0)] | None = None
    user: str | None = None

    @property
    def inputs(self) -> list[str | TokenIds]:
        """One entry for each; token ids as they are."""
        return prompts_in(self.input)

    def check(self) -> None:
        """Raises ApiError for what is well-formed and not to be had."""
        if not self.inputs:
            raise ApiError(400, "there is no input: give at least one", param="input")
        if len(self.inputs) > MAX_INPUTS:
            raise ApiError(400, f"there are {len(self.inputs)} inputs: give at most {MAX_INPUTS}", param="input")
        if "" in self.inputs or [] in self.inputs:
            raise ApiError(400, "an input is empty: leave it out", param="input")


class EmbeddingRequest(InputFields):
    """Inputs of which each gets a vector."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    def check_dimensions(self, dimensions: int) -> None:
        """Raises ApiError where the model's vectors have another number of them."""
        if self.dimensions not in (None, dimensions):
            message = f"dimensions is {self.dimensions}, and the model's vectors have {dimensions}: leave it out"
            raise ApiError(400, message, param="dimensions")

    def response(self, model: str, vectors: NDArray[np.float32], prompt_tokens: int) -> dict[str, Any]:
        """The JSON for `vectors` [inputs, dimensions]."""
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": model,
            "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens},
        }

    def _encoded(self, vector: NDArray[np.float32]) -> list[float] | str:
        if self.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        values: list[float] = vector.tolist()
        return values
