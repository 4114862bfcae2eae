"""Both benchmarks answer in seconds on a tiny model, print nothing but figures with --json, and find nothing amiss."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import run_prefix_cache_benchmark
import run_serving_benchmark
from arms import open_benchmark_model, progress_console
from patience import HANG_S

from kv_execution import PagedEngine
from kv_serving.session import start_engine

ROOT = Path(__file__).resolve().parents[2]
KV_TOKENS = 288
PNG = b"\x89PNG"


@functools.cache
def compiled_engine(config):
    """One tiny engine per configuration, so that what it compiled serves the next test."""
    model = open_benchmark_model(None, tiny=True, console=progress_console())
    return start_engine(model, config, progress_console(), warm_up=True)


@pytest.fixture(autouse=True)
def _compile_once(monkeypatch):
    def start(model, config, console, warm_up) -> PagedEngine:
        assert warm_up
        engine = compiled_engine(config)
        engine.init_paged_runtime()
        return engine

    monkeypatch.setattr("arms.start_engine", start)


def figures_printed(capsys):
    return {line["name"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}


def assert_nothing_amiss(figures, arms):
    for arm in arms:
        for what in ("leaked_pages", "traces", "compilations"):
            assert figures[f"{arm}.{what}"]["spread"]["max"] == 0


def test_serving_prints_both_arms_and_their_ratio(capsys):
    assert run_serving_benchmark.main(["--tiny", "--json", "--passes", "2"]) == 0
    figures = figures_printed(capsys)
    assert_nothing_amiss(figures, ("serving.paged", "serving.dense"))
    # Two slots of 128 tokens are 16 pages of 16, the padding page of neither included.
    assert figures["serving.paged.steps"]["workload"]["kv_capacity_bytes"] == 2 * 128 * 2 * 2 * 2 * 8 * 4
    assert figures["serving.paged.page_overhead"]["value"] < figures["serving.dense.page_overhead"]["value"]
    assert figures["serving.paged_over_dense.steps"]["value"] < 1
    for name in ("output_throughput", "ttft_p50", "ttft_p99"):
        assert figures[f"serving.paged_over_dense.{name}"]["unit"] == "ratio"


def test_serving_takes_a_poisson_trace_and_one_arm(capsys):
    arguments = ["--tiny", "--json", "--passes", "1", "--arm", "paged", "--trace", "poisson"]
    assert run_serving_benchmark.main(arguments) == 0
    figures = figures_printed(capsys)
    assert_nothing_amiss(figures, ["serving.paged"])
    assert {name.split(".")[1] for name in figures} == {"paged"}
    assert figures["serving.paged.ttft_p50"]["reason"] == "one pass has nothing to agree with"
    assert figures["serving.paged.ttft_p50"]["workload"]["rate"] == 100.0


def test_serving_replays_a_trace_file_and_draws_it(tmp_path, capsys):
    trace, picture = tmp_path / "trace.json", tmp_path / "serving.png"
    trace.write_text(json.dumps([{"prompt": [1, 2, 3], "max_tokens": 4, "arrival_s": at / 100} for at in range(3)]))
    arguments = ["--tiny", "--passes", "1", "--arm", "paged", "--max-requests", "1"]
    arguments += ["--trace", "file", "--file", str(trace)]
    plot = ["--plot", str(picture)] if has_matplotlib() else []
    assert run_serving_benchmark.main([*arguments, *plot]) == 0
    printed = capsys.readouterr()
    assert "output throughput" in printed.out
    assert "pass 1 of 1, paged" in printed.err
    if plot:
        assert picture.read_bytes().startswith(PNG)


def test_the_cache_avoids_every_shareable_token_and_changes_none(tmp_path, capsys):
    arguments = ["--tiny", "--json", "--passes", "2"]
    picture = tmp_path / "prefix.png"
    plot = ["--plot", str(picture)] if has_matplotlib() else []
    assert run_prefix_cache_benchmark.main([*arguments, *plot]) == 0
    if plot:
        assert picture.read_bytes().startswith(PNG)
    figures = figures_printed(capsys)
    assert_nothing_amiss(figures, ("prefix_cache.on", "prefix_cache.off"))
    avoided = figures["prefix_cache.on.avoided_tokens"]
    assert avoided["workload"]["shareable_tokens"] == 5 * 40
    assert avoided["value"] == figures["prefix_cache.on.hit_tokens"]["value"]
    assert figures["prefix_cache.on.shareable_avoided"]["value"] >= 0.85
    assert figures["prefix_cache.off.hit_tokens"]["value"] == 0
    misses = [line["value"] for name, line in figures.items() if ".miss_" in name]
    assert sum(misses) == avoided["workload"]["requests"]


def test_all_at_once_shares_too(capsys):
    arguments = ["--tiny", "--json", "--passes", "1", "--requests", "2", "--kv-tokens", str(KV_TOKENS)]
    assert run_prefix_cache_benchmark.main(arguments) == 0
    assert figures_printed(capsys)["prefix_cache.on.avoided_tokens"]["value"] == 40


def test_a_primed_cache_serves_the_first_request_too(tmp_path, capsys):
    shared = list(range(40))
    content = {
        "primer": [{"prompt": shared, "max_tokens": 1}],
        "requests": [{"prompt": [*shared, 40 + own, *range(50, 57)], "max_tokens": 6} for own in range(4)],
    }
    trace = tmp_path / "primed.json"
    trace.write_text(json.dumps(content))
    arguments = ["--tiny", "--json", "--passes", "1", "--workload", "file", "--file", str(trace)]
    arguments += ["--kv-tokens", str(KV_TOKENS)]
    assert run_prefix_cache_benchmark.main(arguments) == 0
    # The primer fills two pages and half of a third, which is not kept; the first request fills it for the others.
    assert figures_printed(capsys)["prefix_cache.on.avoided_tokens"]["value"] == 32 + 3 * 40


def test_a_token_that_the_cache_changed_is_named_and_fails_the_run(capsys, monkeypatch):
    from replay import replay

    def corrupting(engine, requests, **settings):
        result = replay(engine, requests, **settings)
        if not engine.config.prefix_cache:
            return result
        return result._replace(tokens=(*result.tokens[:2], (-1,), *result.tokens[3:]))

    monkeypatch.setattr("arms.replay", corrupting)
    assert run_prefix_cache_benchmark.main(["--tiny", "--json", "--passes", "1"]) == 1
    assert "1 of 6 requests got other tokens with the cache than without, the first is request 2" in (
        capsys.readouterr().err
    )


def test_a_leak_and_a_trace_fail_the_run(capsys, monkeypatch):
    from replay import replay

    def leaking(engine, requests, **settings):
        result = replay(engine, requests, **settings)
        return result._replace(counts=result.counts._replace(leaked_pages=2, traces=1))

    monkeypatch.setattr("arms.replay", leaking)
    assert run_serving_benchmark.main(["--tiny", "--json", "--passes", "1", "--arm", "dense"]) == 1
    errors = capsys.readouterr().err
    assert "dense: 2 leaked pages in a measured pass" in errors
    assert "dense: 1 traces in a measured pass" in errors


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace", "file", "--file", "nowhere.json"], "trace file nowhere.json cannot be read"),
        (["nowhere.gguf"], "nowhere.gguf"),
        (["nowhere.gguf", "--tiny"], "--tiny brings its own random model"),
        (["--tiny", "--passes", "0"], "0 passes measure nothing"),
        (["--tiny", "--slots", "0"], "holds no request"),
        (["--tiny", "--rate", "0", "--trace", "poisson"], "a rate of 0 requests"),
        (["--tiny", "--trace", "file"], "the longest request has 640 tokens"),
        (["--tiny", "--trace", "file", "--file", "strange.json"], "token id 96 of the trace is outside the vocabulary"),
        (["--tiny", "--plot", "nowhere/picture.png"], "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("strange.json").write_text('[{"prompt": [1, 96], "max_tokens": 1}]')
    if "--plot" in arguments and not has_matplotlib():
        says = "--plot needs matplotlib"
    assert run_serving_benchmark.main(arguments) == 2
    printed = capsys.readouterr()
    assert says in printed.err.splitlines()[-1]
    assert not printed.out


def test_the_script_explains_itself_from_any_folder(tmp_path):
    run = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "run_serving_benchmark.py"), "--help"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_S,
    )
    assert "--tiny" in run.stdout


def has_matplotlib():
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True
