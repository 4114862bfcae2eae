"""What the cache, the engine and the command line need to know about a model, and nothing else.

Contract: a plain value that a loader fills in once and everybody reads. It carries sizes and names, no arrays and no
code, so the control plane can plan for a model without importing jax or the model.
"""

from dataclasses import dataclass

from kv_common.errors import JaxkvError


class ModelSpecError(JaxkvError):
    """A model whose sizes contradict each other."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of one loaded model.

    Attributes:
        name: what to call it in output, e.g. `SmolLM2-135M-Instruct`.
        architecture: the family that implements it, e.g. `llama`.
        max_context: the most tokens (prompt and generated) that one sequence may hold.
        dtype: name of the compute dtype, which is also the default K/V dtype.
        num_parameters: weights counted as numbers; parameter_bytes: what they occupy in memory as stored.
        eos_token_ids: any of these ends a generation.
        attention_window: tokens that a query sees, itself included, in the layer with the largest window of those that
            have one; None where no layer has one.
        attention_reach: tokens that a query sees in any layer, itself included: the largest window where every layer
            has one; None where a layer sees all.
        attention_soft_cap: scores become cap * tanh(score / cap); None leaves them.
        num_labels: scores that it gives a sequence, in the place of logits; 0 where it makes embeddings alone, None
            where it generates text.

    Raises:
        ModelSpecError: a size below 1, or query heads that do not divide into the K/V heads.
    """

    name: str
    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_context: int
    dtype: str
    num_parameters: int
    parameter_bytes: int
    eos_token_ids: tuple[int, ...] = ()
    attention_window: int | None = None
    attention_reach: int | None = None
    attention_soft_cap: float | None = None
    num_labels: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "vocab_size", "max_context"):
            if getattr(self, name) < 1:
                raise ModelSpecError(f"{name} is {getattr(self, name)}; a model needs at least 1: check its config")
        if self.num_heads % self.num_kv_heads:
            raise ModelSpecError(
                f"{self.num_heads} query heads do not divide into {self.num_kv_heads} K/V heads: check its config"
            )

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share one K/V head."""
        return self.num_heads // self.num_kv_heads
