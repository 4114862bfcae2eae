"""The wheel holds every module of every package, the native kernels, and nothing of the tests."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.import_rule_check import LAYERS

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_the_command(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(REPOSITORY)]
    subprocess.run(pip, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("jaxkv-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "jaxkv = kv_serving.console_script:main" in archive.read(entry_points).decode()
    files = [path for layer in LAYERS for path in (REPOSITORY / layer).rglob("*")]
    shipped = {str(path.relative_to(REPOSITORY)) for path in files if path.suffix in (".py", ".html")}
    assert "kv_serving/server/status.html" in shipped
    assert packed == shipped | {"kv_kernels/native/_kernels.so"}
