"""The control-plane benchmark runs as a script and prints nothing but figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

from patience import HANG_S

ROOT = Path(__file__).parents[2]


def test_the_headline_is_printed_per_step_and_per_request():
    script = ROOT / "benchmarks" / "run_control_plane_benchmark.py"
    run = subprocess.run(
        [sys.executable, str(script), "--headline", "--passes", "2", "--steps", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_S,
    )
    figures = {line["name"]: line for line in map(json.loads, run.stdout.splitlines())}
    step, per_request = (figures[f"control_plane.headline.step_cpu{suffix}"] for suffix in ("", "_per_request"))
    assert step["workload"]["requests"] == 256
    assert step["workload"]["context"] == 4096
    assert step["value"] / 256 == per_request["value"]
    assert "headline" in run.stderr
