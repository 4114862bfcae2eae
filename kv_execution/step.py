"""The jitted programs of a step: the network over the pools, then what chooses the tokens, all on the device.

The state (pools, token histories, logit biases) is taken by donation and returned. Token ids are read from the
histories, where sampling leaves them, so that a step can be dispatched before the tokens of the last one have reached
the host. The output product and sampling are programs of their own, since they depend on the number of rows only:
compiled into every shape of the network they would take half of the warm-up. Where no row asks for more than the most
likely token, one small program finds that, and no logits are written where the provider can do without.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kv_common.layout import KvStorageLayoutV1
from kv_execution.protocols import CausalModel
from kv_execution.sampler_state import SamplerState, record_tokens
from kv_execution.sampling import GreedyInputs, SamplingInputs, allowed_logits, sample
from kv_execution.step_values import (
    BurstInputs,
    BurstResult,
    DeviceState,
    ForwardInputs,
    ForwardResult,
    GreedyResult,
    NetworkResult,
    PoolResult,
    SampleResult,
    ScoreResult,
)
from kv_kernels.adapters import AdapterCapacity, column_mask
from kv_kernels.output_products import OutputProducts
from kv_kernels.provider import KernelProvider, Placement, PoolPair
from kv_kernels.step_view import StepView
from kv_kernels.tensor_parallel import POOL_SPEC

COUNTED_OPERATIONS = 2048
"""XLA's CPU client runs a program on the thread that calls it where it counts fewer than a thousand operations, and it
counts none of a kernel library's: the host would wait for the step instead of planning the next one."""


class StepPrograms(NamedTuple):
    """Jitted functions; states are donated, and by `pool` sums.

    forward: (params, DeviceState, ForwardInputs) to ForwardResult; score: those to ScoreResult. pool: those, weights
    [tokens] f32 and sums [rows of the engine, hidden] f32 to PoolResult. classify: (params, sums) to scores [rows of
    the engine, labels] f32. logits: (params, hidden [rows, hidden]) to logits [rows, vocab] f32. mask: (logits, allowed
    tokens) to eligible logits. sample: (logits, eligible logits, SamplerState, SamplingInputs) to SampleResult. greedy:
    (params, hidden, SamplerState, GreedyInputs) to GreedyResult. burst: (params, DeviceState, BurstInputs) to
    BurstResult, every step `forward` and `greedy`.
    """

    forward: jax.stages.Wrapped
    score: jax.stages.Wrapped
    pool: jax.stages.Wrapped
    classify: jax.stages.Wrapped
    logits: jax.stages.Wrapped
    mask: jax.stages.Wrapped
    sample: jax.stages.Wrapped
    greedy: jax.stages.Wrapped
    burst: jax.stages.Wrapped


def build_step_programs(
    model: CausalModel,
    provider: KernelProvider,
    layout: KvStorageLayoutV1,
    *,
    unroll_layers: bool,
    adapters: AdapterCapacity | None = None,
    on_trace: Callable[[], None],
) -> StepPrograms:
    """The programs of a model, which has the room of `adapters`; `on_trace` is called whenever one is traced for a new
    shape.

    Over a mesh the network is one manual region and the output product another: plan, positions, tokens and hidden
    states are the same on every rank, heads and pools are its own. Sampling runs on every device on the same logits.
    """
    mesh = model.tensor_mesh
    products = OutputProducts(provider, 1 if mesh is None else mesh.width)

    def tokens_of(history: jax.Array, inputs: ForwardInputs) -> jax.Array:
        # The history has every token: prompts since their request began, sampled ones since they were sampled.
        token_ids = history.at[inputs.token_rows, inputs.positions].get(mode="clip")
        if jax.default_backend() == "cpu":
            # True whatever the tokens are, which XLA cannot know: operations for it to count.
            counted = token_ids[:1] + jnp.arange(COUNTED_OPERATIONS)
            token_ids = jnp.where(jnp.max(counted) >= 0, token_ids, -1)
        return token_ids

    def view_of(pools: PoolPair, history: jax.Array, inputs: ForwardInputs) -> StepView:
        return StepView(
            positions=inputs.positions,
            pools=pools,
            placement=Placement(inputs.slots, inputs.scrub_pages, inputs.copy_sources, inputs.copy_targets),
            plan=inputs.plan,
            provider=provider,
            num_pages=layout.num_pages,
            unroll=unroll_layers,
            tensor_width=1 if mesh is None else mesh.width,
            expert_shards=1 if mesh is None else mesh.expert_shards,
            used=_used(inputs.token_rows, history),
            adapter_mask=None if adapters is None else column_mask(inputs.adapter_slots, adapters),
        )

    def network(params: Any, pools: PoolPair, history: jax.Array, inputs: ForwardInputs) -> NetworkResult:
        token_ids = tokens_of(history, inputs)
        x, view = model.forward(params, token_ids, view_of(pools, history, inputs), inputs.logit_rows)
        return NetworkResult(view.pools, x)

    def scoring_network(params: Any, pools: PoolPair, history: jax.Array, inputs: ForwardInputs) -> NetworkResult:
        token_ids = tokens_of(history, inputs)
        x, view = model.forward(params, token_ids, view_of(pools, history, inputs), jnp.arange(token_ids.shape[0]))
        return NetworkResult(view.pools, model.logits(params, x, products))

    def hidden_network(params: Any, pools: PoolPair, history: jax.Array, inputs: ForwardInputs) -> NetworkResult:
        hidden, view = model.hidden(params, tokens_of(history, inputs), view_of(pools, history, inputs))
        return NetworkResult(view.pools, hidden)

    def output_logits(params: Any, hidden: jax.Array) -> jax.Array:
        logits: jax.Array = model.logits(params, hidden, products)
        return logits

    def most_likely(params: Any, hidden: jax.Array, used: jax.Array) -> jax.Array:
        tokens: jax.Array = model.most_likely(params, hidden, replace(products, used=used))
        return tokens

    # What a program returns beside the state or without it, and the state with what stands beside it.
    result_sharding: Any = None
    step_shardings: tuple[Any, Any] | None = None
    if mesh is not None:
        everywhere: Any = PartitionSpec()
        by_head: Any = POOL_SPEC
        of_params: Any = _specs_of(model.params)

        def over_pools(network: Callable[..., NetworkResult]) -> Callable[..., NetworkResult]:
            specs = (of_params, by_head, everywhere, everywhere)
            return mesh.manual(network, specs, NetworkResult(by_head, everywhere))

        network, scoring_network, hidden_network = map(over_pools, (network, scoring_network, hidden_network))
        output_logits = mesh.manual(output_logits, (of_params, everywhere), everywhere)
        most_likely = mesh.manual(most_likely, (of_params, everywhere, everywhere), everywhere)
        result_sharding = mesh.replicated
        pool_sharding: Any = mesh.sharding(POOL_SPEC)
        step_shardings = (DeviceState(pool_sharding, result_sharding), result_sharding)

    def compute(params: Any, state: DeviceState, inputs: ForwardInputs) -> ForwardResult:
        pools, hidden = network(params, state.pools, jnp.asarray(state.sampler.history), inputs)
        return ForwardResult(state._replace(pools=pools), hidden)

    def choose(params: Any, hidden: jax.Array, state: SamplerState, inputs: GreedyInputs) -> GreedyResult:
        # What `sample` chooses where nothing is asked.
        token = most_likely(params, hidden, _used(inputs.history_row, jnp.asarray(state.history)))
        return GreedyResult(record_tokens(state, inputs.history_row, inputs.position, token), token)

    def forward(params: Any, state: DeviceState, inputs: ForwardInputs) -> ForwardResult:
        on_trace()
        return compute(params, state, inputs)

    def score(params: Any, state: DeviceState, inputs: ForwardInputs) -> ScoreResult:
        on_trace()
        pools, logits = scoring_network(params, state.pools, jnp.asarray(state.sampler.history), inputs)
        return ScoreResult(state._replace(pools=pools), jax.nn.log_softmax(logits, axis=-1))

    def pool(params: Any, state: DeviceState, inputs: ForwardInputs, weights: jax.Array, sums: jax.Array) -> PoolResult:
        on_trace()
        pools, hidden = hidden_network(params, state.pools, jnp.asarray(state.sampler.history), inputs)
        # Tokens of padding weigh nothing, whatever they are, and are in a row behind the last.
        weighted = jnp.where(weights[:, None] == 0, 0, hidden * weights[:, None])
        return PoolResult(state._replace(pools=pools), sums.at[inputs.token_rows].add(weighted, mode="drop"))

    def classify(params: Any, sums: jax.Array) -> Any:
        on_trace()
        return model.classify(params, sums)

    def logits_of_rows(params: Any, hidden: jax.Array) -> jax.Array:
        on_trace()
        return output_logits(params, hidden)

    def mask_rows(logits: jax.Array, allowed: Any) -> jax.Array:
        on_trace()
        return allowed_logits(logits, allowed)

    def sample_rows(
        logits: jax.Array, eligible: jax.Array, state: SamplerState, inputs: SamplingInputs
    ) -> SampleResult:
        on_trace()
        sampled = sample(logits, inputs, state, eligible)
        # Rows that do not sample in this step carry a history row outside the table, which drops the write.
        return SampleResult(record_tokens(state, inputs.history_row, inputs.position, sampled.token), sampled)

    def greedy_rows(params: Any, hidden: jax.Array, state: SamplerState, inputs: GreedyInputs) -> GreedyResult:
        on_trace()
        return choose(params, hidden, state, inputs)

    def burst(params: Any, state: DeviceState, inputs: BurstInputs) -> BurstResult:
        on_trace()

        def step(index: jax.Array, so_far: BurstResult) -> BurstResult:
            first = inputs.first
            inputs_now = first._replace(
                positions=first.positions + index,
                slots=jnp.asarray(inputs.slots)[index],
                plan=provider.later(first.plan, index),
                # Pages of all steps are made ready by the first.
                scrub_pages=jnp.where(index == 0, first.scrub_pages, -1),
                copy_targets=jnp.where(index == 0, first.copy_targets, -1),
            )
            state, hidden = compute(params, so_far.state, inputs_now)
            chosen = choose(params, hidden, state.sampler, GreedyInputs(inputs_now.positions + 1, first.token_rows))
            return BurstResult(state._replace(sampler=chosen.state), so_far.token.at[index].set(chosen.token))

        none = jnp.full(inputs.slots.shape, -1, jnp.int32)
        return jax.lax.fori_loop(0, inputs.steps, step, BurstResult(state, none))

    def shardings(result: Callable[..., Any]) -> Any:
        return None if step_shardings is None else result(*step_shardings)

    return StepPrograms(
        forward=jax.jit(forward, donate_argnums=1, out_shardings=shardings(ForwardResult)),
        score=jax.jit(score, donate_argnums=1, out_shardings=shardings(ScoreResult)),
        pool=jax.jit(pool, donate_argnums=(1, 4), out_shardings=shardings(PoolResult)),
        classify=jax.jit(classify, out_shardings=result_sharding),
        logits=jax.jit(logits_of_rows, out_shardings=result_sharding),
        mask=jax.jit(mask_rows, out_shardings=result_sharding),
        sample=jax.jit(sample_rows, donate_argnums=2, out_shardings=result_sharding),
        greedy=jax.jit(greedy_rows, donate_argnums=2, out_shardings=result_sharding),
        burst=jax.jit(burst, donate_argnums=1, out_shardings=shardings(BurstResult)),
    )


def _used(rows: Any, history: jax.Array) -> jax.Array:
    """How many of `rows` [n] i32 there are up to the last that is in the history, which padding is not -> [] i32."""
    count = jnp.arange(1, len(rows) + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(jnp.asarray(rows) < history.shape[0], count, 0))


def _specs_of(params: Any) -> Any:
    """How each parameter is spread, as the loader placed it."""
    return jax.tree.map(lambda array: array.sharding.spec, params)
