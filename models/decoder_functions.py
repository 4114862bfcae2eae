"""What an engine calls of a model: pure functions of the parameters that they are given, which may be tracers."""

from __future__ import annotations

from typing import Any

import jax

from kv_kernels.output_products import OutputProducts
from kv_kernels.step_view import StepView
from models.decoder import Decoder, Forward, Hidden


class DecoderFunctions:
    """The functions of a model whose network is `decoder`."""

    decoder: Decoder

    def forward(self, params: dict[str, Any], token_ids: jax.Array, step: StepView, logit_rows: jax.Array) -> Forward:
        """Hidden states [rows, hidden], of which `logits` makes logits, of the tokens at logit_rows [rows] among
        token_ids [tokens], both i32. A step has a mask of adapters where the model has room for them.
        """
        return self.decoder.bind(params)(token_ids, step, logit_rows)

    def logits(self, params: dict[str, Any], x: jax.Array, products: OutputProducts) -> jax.Array:
        """Logits [rows, vocab] f32 of what `forward` gives."""
        return self.decoder.bind(params).logits(x, products)

    def most_likely(self, params: dict[str, Any], x: jax.Array, products: OutputProducts) -> jax.Array:
        """Where the largest of each row of `logits` is [rows] i32, the first of equals."""
        return self.decoder.bind(params).most_likely(x, products)

    def hidden(self, params: dict[str, Any], token_ids: jax.Array, step: StepView) -> Hidden:
        """Final hidden states [tokens, hidden] f32 of token_ids [tokens] i32, behind the last norm."""
        return self.decoder.bind(params).hidden(token_ids, step)

    def classify(self, params: dict[str, Any], hidden: jax.Array) -> jax.Array:
        """Scores [rows, labels] f32 of the hidden states [rows, hidden] f32 of last tokens. Of a classifier."""
        return self.decoder.bind(params).classify(hidden)
