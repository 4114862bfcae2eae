"""The benchmark of GPU kernels: a line where there is no GPU, and every figure where something can run it."""

import json

import run_gpu_kernels_benchmark as benchmark

from kv_kernels.pallas import PallasProvider


def test_without_a_gpu_it_says_so_and_ends_well(capsys):
    benchmark.main([])
    assert capsys.readouterr().out == "no GPU: jax runs on cpu; nothing to measure\n"


def test_every_operation_is_measured_against_the_limit_that_binds_it(capsys):
    sizes = benchmark.Sizes(
        *(4, 2, 8, 16, "float32"),
        **{"pool_bytes": 1 << 16, "repeats": 2, "limit_bytes": 1 << 16, "matrix": 16},
        **{"appends": (4,), "prefills": ((8, 20),), "decodes": ((2, 33),)},
    )
    benchmark.measure_limits(sizes, passes=2)
    limits = benchmark.Limits(bytes_per_s=1e9, flops_per_s=1e12)
    benchmark.measure_provider(PallasProvider(interpret=True), sizes, limits, passes=2)
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [figure["name"] for figure in figures] == [
        *("device.bandwidth", "device.product_rate"),
        *("pallas.append.tokens4.time", "pallas.append.tokens4.of_bandwidth"),
        *("pallas.prefill.tokens8_context20.time", "pallas.prefill.tokens8_context20.of_bandwidth"),
        *("pallas.decode.rows2_context33.time", "pallas.decode.rows2_context33.of_bandwidth"),
    ]
    least_us = (20 * 2 * 2 * 8 * 4 + 2 * 8 * 4 * 8 * 4) / 1e9 * 1e6
    time_us, share = figures[4]["spread"], figures[5]["spread"]
    assert abs(share["max"] * time_us["min"] / 100 - least_us) < 1e-6 * least_us
