"""Which programs choose the tokens of a step: a small one where all rows are greedy, else one for all that may be
asked, behind a mask where some rows are held to certain tokens.

The mask is a program of its own so that the large one is compiled once: a second copy that has it would take a quarter
of a server's warm-up.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax

from kv_execution.sampler_state import SamplerState
from kv_execution.sampling import ConstrainedInputs, GreedyInputs, SamplingInputs, StepSampling
from kv_execution.step import GreedyResult, SampleResult, StepPrograms


def samplers_for(plain: Collection[bool], constrained: bool) -> tuple[type[StepSampling], ...]:
    """The kinds of inputs of steps that are `plain` (see SamplingParams), that are not, or both."""
    kinds: list[type[StepSampling]] = [GreedyInputs if each else SamplingInputs for each in plain]
    return (*kinds, ConstrainedInputs) if constrained else tuple(kinds)


def choose_tokens(
    programs: StepPrograms, logits: jax.Array, state: SamplerState, sampling: StepSampling
) -> GreedyResult | SampleResult:
    """Start the sampler on `logits` [rows, vocab] f32; the state is donated."""
    result: GreedyResult | SampleResult = _run(programs, logits, state, sampling, _called)
    return result


def compile_sampler(programs: StepPrograms, logits: Any, state: SamplerState, sampling: StepSampling) -> None:
    """Compile what `choose_tokens` would run, for `logits` of a shape."""
    _run(programs, logits, state, sampling, _compiled)


def _run(
    programs: StepPrograms, logits: Any, state: SamplerState, sampling: StepSampling, use: Callable[..., Any]
) -> Any:
    if isinstance(sampling, GreedyInputs):
        return use(programs.greedy, logits, state, sampling)
    eligible = logits
    if isinstance(sampling, ConstrainedInputs):
        eligible, sampling = use(programs.mask, logits, sampling.allowed), sampling.sampling
    return use(programs.sample, logits, eligible, state, sampling)


def _called(program: jax.stages.Wrapped, *given: Any) -> Any:
    return program(*given)


def _compiled(program: jax.stages.Wrapped, *given: Any) -> Any:
    lowered = program.lower(*given)
    lowered.compile()
    return lowered.out_info
