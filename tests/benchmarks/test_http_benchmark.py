"""The benchmark of the server runs on a tiny model, prints figures alone with --json, and finds the same answers."""

import json
import sys
from pathlib import Path

import run_http_benchmark

sys.path.append(str(Path(__file__).resolve().parents[1] / "serving"))
from tiny_model import write_tiny_model


def test_the_server_gives_the_engines_answers(tmp_path, capsys):
    model = str(write_tiny_model(tmp_path))
    small = [
        "--clients",
        "2",
        "--requests",
        "4",
        "--prompt-tokens",
        "8",
        "--output-tokens",
        "6",
        "--max-step-tokens",
        "8",
    ]
    assert run_http_benchmark.main([model, "--json", "--passes", "2", *small]) == 0
    figures = {line["name"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert figures["http.ratio.output_throughput"]["unit"] == "ratio"
    assert figures["http.served.output_throughput"]["workload"]["same_answers"] is True
    assert set(figures) >= {"http.alone.output_throughput", "http.served.first_p99", "http.served.gap_p50"}
