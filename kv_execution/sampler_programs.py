"""Which programs choose the tokens of a step: where all rows are greedy one that finds the most likely tokens, else one
for the logits and one for all that may be asked of them, and between those a mask where some rows are held to certain
tokens.

The mask is a program of its own so that the large one is compiled once: a second copy that has it would take a quarter
of a server's warm-up.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax

from kv_execution.sampler_state import SamplerState
from kv_execution.sampling import ConstrainedInputs, GreedyInputs, SamplingInputs, StepSampling
from kv_execution.step import StepPrograms
from kv_execution.step_values import GreedyResult, SampleResult


def samplers_for(plain: Collection[bool], constrained: bool) -> tuple[type[StepSampling], ...]:
    """The kinds of inputs of steps that are `plain` (see SamplingParams), that are not, or both."""
    kinds: list[type[StepSampling]] = [GreedyInputs if each else SamplingInputs for each in plain]
    return (*kinds, ConstrainedInputs) if constrained else tuple(kinds)


def choose_tokens(
    programs: StepPrograms, params: Any, hidden: jax.Array, state: SamplerState, sampling: StepSampling
) -> GreedyResult | SampleResult:
    """Start the sampler on the rows' `hidden` states [rows, hidden]; the sampler's state is donated."""
    result: GreedyResult | SampleResult = _run(programs, params, hidden, state, sampling, _called)
    return result


def compile_sampler(
    programs: StepPrograms, params: Any, hidden: Any, state: SamplerState, sampling: StepSampling
) -> None:
    """Compile what `choose_tokens` would run, for `hidden` of a shape."""
    _run(programs, params, hidden, state, sampling, _compiled)


def _run(
    programs: StepPrograms,
    params: Any,
    hidden: Any,
    state: SamplerState,
    sampling: StepSampling,
    use: Callable[..., Any],
) -> Any:
    if isinstance(sampling, GreedyInputs):
        return use(programs.greedy, params, hidden, state, sampling)
    logits = eligible = use(programs.logits, params, hidden)
    if isinstance(sampling, ConstrainedInputs):
        eligible, sampling = use(programs.mask, logits, sampling.allowed), sampling.sampling
    return use(programs.sample, logits, eligible, state, sampling)


def _called(program: jax.stages.Wrapped, *given: Any) -> Any:
    return program(*given)


def _compiled(program: jax.stages.Wrapped, *given: Any) -> Any:
    lowered = program.lower(*given)
    lowered.compile()
    return lowered.out_info
