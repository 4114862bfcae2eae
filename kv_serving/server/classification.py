"""The body of /classify, under vLLM's names, and the response to it."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_serving.server.embedding_protocol import InputFields


class ClassifyRequest(InputFields):
    """Texts, or token ids, of which each gets a label."""

    use_activation: bool | None = None
    """Whether the scores become probabilities, which is so where it is left out."""
    activation: bool | None = None
    """Its earlier name."""

    def response(
        self, model: str, labels: Sequence[str], scores: NDArray[np.float32], prompt_tokens: int
    ) -> dict[str, Any]:
        """The JSON for `scores` [inputs, labels]."""
        wanted = self.activation if self.use_activation is None else self.use_activation
        shown = scores if wanted is False else probabilities(scores)
        return {
            "id": f"classify-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [
                {
                    "index": index,
                    "label": labels[int(np.argmax(each))],
                    "probs": each.tolist(),
                    "num_classes": len(labels),
                }
                for index, each in enumerate(shown)
            ],
            "usage": {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens, "completion_tokens": 0},
        }


def probabilities(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scores [inputs, labels] as probabilities that add up to 1; of one label alone, the probability that it holds."""
    if scores.shape[1] == 1:
        return np.divide(1 + np.tanh(scores / 2), 2, dtype=np.float32)
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.divide(raised, raised.sum(axis=1, keepdims=True), dtype=np.float32)
