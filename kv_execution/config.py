"""How an engine is set up: checked once here, then handed down in parts."""

import sys
from dataclasses import dataclass
from numbers import Integral

from kv_common.errors import JaxkvError


class EngineConfigError(JaxkvError):
    """A setting that is out of range or contradicts another."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of a `PagedEngine`.

    Attributes:
        kv_pool_bytes: bytes for the K and V pools together, page 0 (padding) included; on each device.
        tokens_per_page: tokens in a page.
        max_requests: requests that run at once; more wait.
        max_step_tokens: the token budget of one step, which also bounds a prefill chunk.
        max_context: longest prompt plus answer in tokens; None for the model's own limit.
        kv_dtype: dtype of the pools; None for the model's compute dtype.
        prefix_cache: keep the K/V of full pages and share it between requests that begin with the same tokens.
        longest_prefix_first: among those that have waited longest, admit the requests that share most first.
        max_waiting: requests that may wait; None for any number.
        burst_s: where every request only decodes, and each asks for the most likely token, make steps for about so many
            seconds, and at most 8, before the host hears of their tokens: they come in bursts, and new requests wait as
            much longer. 0 for single steps; so are those of GPU kernels, and of several processes.
        int8_activations: round activations to 8 bits, 32 with one scale, where weights of 4 bits meet them, or of 8 in
            blocks of 32 (Q8_0), as other engines do by default: less exact, and faster on CPUs with AVX-512 VNNI and
            BF16 that have no matrix tiles. Refused on others.
        provider: kernel provider by name, or `auto`.
        tensor_parallel: the number of devices; a model on one device is copied over so many. None for those it is on.
        max_adapters: low-rank adapters that can be loaded at once; 0 leaves them, and their cost, out.
        max_adapter_rank: the largest rank of one.
        unroll_layers: lay the layer loop out layer by layer: slower to compile, and faster where a backend would copy
            a layer's weights out of their stack.
        compilation_cache: keep what is compiled in the user's cache folder, unless jax was given another folder or
            none. It is a setting of the whole process, so it counts in the first engine that has it.
        debug: check every invariant after every step, and fill freed pages with NaN so that any read is loud.
    """

    kv_pool_bytes: int = 512 << 20
    tokens_per_page: int = 16
    max_requests: int = 32
    max_step_tokens: int = 256
    max_context: int | None = None
    kv_dtype: str | None = None
    prefix_cache: bool = True
    longest_prefix_first: bool = False
    max_waiting: int | None = None
    burst_s: float = 0.05
    int8_activations: bool = False
    provider: str = "auto"
    tensor_parallel: int | None = None
    max_adapters: int = 0
    max_adapter_rank: int = 16
    unroll_layers: bool = False
    compilation_cache: bool = True
    debug: bool = False

    def __post_init__(self) -> None:
        for name, least, optional in (
            ("kv_pool_bytes", 1, False),
            ("tokens_per_page", 1, False),
            ("max_requests", 1, False),
            ("max_step_tokens", 1, False),
            ("max_context", 2, True),  # a token of prompt and one of answer
            ("max_waiting", 0, True),
            ("tensor_parallel", 1, True),
            ("max_adapters", 0, False),
            ("max_adapter_rank", 1, False),
        ):
            value = getattr(self, name)
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not (whole and value >= least) and not (optional and value is None):
                wanted = f"a whole number of at least {least}" + (", or None" if optional else "")
                raise EngineConfigError(f"{name} is {value!r}; give {wanted}")
        for name in (
            "prefix_cache",
            "longest_prefix_first",
            "int8_activations",
            "unroll_layers",
            "compilation_cache",
            "debug",
        ):
            if not isinstance(getattr(self, name), bool):
                raise EngineConfigError(f"{name} is {getattr(self, name)!r}; give True or False")
        burst_s: object = self.burst_s
        if isinstance(burst_s, bool) or not isinstance(burst_s, (int, float)) or not 0 <= burst_s <= sys.float_info.max:
            raise EngineConfigError(f"burst_s is {self.burst_s!r}; give seconds, 0 or more")
        if self.max_step_tokens < self.max_requests:
            raise EngineConfigError(
                f"max_step_tokens {self.max_step_tokens} is below max_requests {self.max_requests}, so a "
                "step could not give every running request a token; raise the first or lower the second"
            )
