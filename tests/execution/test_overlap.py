"""The host plans the next step while the device works on this one."""

from engine_case import golden_model, make_engine

from kv_control.buckets import StepShape


def test_the_network_of_one_token_does_not_run_on_the_thread_that_starts_it():
    # It would, for XLA, where it counted fewer than a thousand operations; a kernel library's do not count.
    engine = make_engine(golden_model("llama"), provider="native", max_requests=4)
    engine.init_paged_runtime()
    runtime = engine._runtime
    inputs = runtime._inputs.of(None, StepShape(1, 1, 128))
    compiled = runtime.programs.forward.lower(engine.model.params, runtime.state, inputs).compile()
    assert compiled.cost_analysis()["flops"] >= 1000
