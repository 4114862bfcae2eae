"""What the benchmark of replicas asks of each arm, asked of one server."""

import argparse
import sys
from pathlib import Path

import pytest
import run_replicas_benchmark as benchmark

sys.path.append(str(Path(__file__).resolve().parents[1] / "serving"))
from server_case import running_server


@pytest.mark.slow
def test_all_but_the_first_prompt_with_a_prefix_find_it_cached(tmp_path):
    options = argparse.Namespace(requests=3, output_tokens=4, prefixes=3, prefix_tokens=32, turns=3, clients=2)
    with running_server(tmp_path) as case:
        port = int(case.server.url.rpartition(":")[2])
        for index in range(2):
            measures = benchmark.measure(port, options, index)
            assert measures["cached_share"].value == pytest.approx(2 * 32 / (3 * (32 + benchmark.SUFFIX_TOKENS)))
    assert set(measures) == {name for names in benchmark.GROUPS.values() for name in names}


def test_a_server_that_does_not_start_is_said_to(tmp_path, capsys):
    assert benchmark.main([str(tmp_path / "nothing"), "--passes", "1"]) == 2
    assert "is not ready" in capsys.readouterr().err
