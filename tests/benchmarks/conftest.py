"""The benchmarks import each other as the scripts that they are; so do their tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
