"""The trie benchmark runs as a script and prints nothing but figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

from patience import HANG_S

ROOT = Path(__file__).parents[2]


def test_every_operation_is_printed_per_page_for_every_size():
    script = ROOT / "benchmarks" / "run_trie_benchmark.py"
    run = subprocess.run(
        [sys.executable, str(script), "--passes", "2", "--cached-pages", "500", "9000"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_S,
    )
    figures = [json.loads(line) for line in run.stdout.splitlines()]
    names = ["match", "match_again", "publish", "publish_one", "evict", "evict_few"]
    assert [figure["name"] for figure in figures] == [f"prefix_trie.{name}" for name in names] * 2
    assert {figure["workload"]["cached_pages"] for figure in figures} == {500, 9000}
    assert {figure["unit"] for figure in figures} == {"us/page"}
