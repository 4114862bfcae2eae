"""The import rule: every kind of violation is found in a made-up tree, and the real tree has none."""

import ast
from pathlib import Path

import pytest

from tools.import_rule_check import LAYERS, check_host_imports, check_sources, imports_of, main


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for package in LAYERS:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    return tmp_path


def write(tree: Path, path: str, source: str) -> None:
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(source)


def violations_of(tree: Path, path: str, source: str) -> list[str]:
    write(tree, path, source)
    return [str(violation) for violation in check_sources(tree)]


@pytest.mark.parametrize(
    ("package", "target"),
    [
        ("kv_common", "kv_control"),
        ("kv_common", "jax"),
        ("kv_common", "ml_dtypes"),
        ("kv_control", "kv_kernels"),
        ("kv_control", "jax.numpy"),
        ("kv_control", "tokenizers"),
        ("kv_kernels", "kv_control"),
        ("kv_kernels", "models"),
        ("kv_kernels", "safetensors"),
        ("models", "kv_control"),
        ("models", "kv_execution"),
        ("models", "torch"),
        ("kv_execution", "models"),
        ("kv_execution", "kv_serving"),
        ("kv_serving", "flashinfer"),
        ("kv_export", "kv_serving"),
        ("kv_export", "fastapi"),
        ("models", "jax_aiter"),
        ("kv_execution", "jax_tvm_ffi"),
        ("kv_execution", "tvm_ffi.core"),
        ("kv_serving", "tools.import_rule_check"),
    ],
)
def test_an_import_that_the_table_does_not_allow_is_one_line(tree: Path, package: str, target: str) -> None:
    (line,) = violations_of(tree, f"{package}/part.py", f'"""Doc."""\nimport {target}\n')
    assert line.startswith(f"{package}/part.py:2: imports {target}, ")


@pytest.mark.parametrize("package", LAYERS)
def test_everything_in_the_table_is_allowed(tree: Path, package: str) -> None:
    targets = sorted(LAYERS[package].ours | LAYERS[package].libraries | {package, "json", "numpy"})
    assert violations_of(tree, f"{package}/part.py", "".join(f"import {name}\n" for name in targets)) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import jax\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jax import Array\n",
        "try:\n    import jax as fast\nexcept ImportError:\n    fast = None\n",
        "import json, jax.numpy as jnp\n",
        "import importlib\nimportlib.import_module('jax')\n",
        "from importlib import import_module\nimport_module(name='jax.numpy')\n",
        "jax = __import__('jax')\n",
        "class A:\n    async def f(self):\n        from jax.lax import scan\n",
    ],
)
def test_an_import_is_found_however_it_is_written(tree: Path, source: str) -> None:
    (line,) = violations_of(tree, "kv_control/part.py", source)
    assert ": imports jax" in line


@pytest.mark.parametrize(
    ("path", "source", "target"),
    [
        ("kv_control/part.py", "from .. import models\n", "models"),
        ("kv_control/part.py", "from ..models import loader\n", "models"),
        ("kv_control/deep/part.py", "from ...models import loader\n", "models"),
        (
            "kv_control/part.py",
            "from importlib import import_module\nimport_module('.loader', 'models')\n",
            "models.loader",
        ),
    ],
)
def test_a_relative_import_is_followed_out_of_the_package(tree: Path, path: str, source: str, target: str) -> None:
    (line,) = violations_of(tree, path, source)
    assert f": imports {target}, of our packages kv_control may import kv_common" in line


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kv_control/__init__.py", "from .queue import Queue\n"),
        ("kv_control/part.py", "from . import queue\n"),
        ("kv_control/deep/part.py", "from ..queue import Queue\n"),
        ("kv_control/part.py", "from importlib import import_module\nimport_module('.queue', __package__)\n"),
    ],
)
def test_a_relative_import_inside_the_package_is_allowed(tree: Path, path: str, source: str) -> None:
    assert violations_of(tree, path, source) == []


def test_the_word_import_in_a_string_is_not_an_import(tree: Path) -> None:
    assert violations_of(tree, "kv_common/part.py", '"""import jax"""\nname = "jax"\n') == []


def test_only_kernels_may_know_a_vendor_and_the_line_says_so(tree: Path) -> None:
    assert violations_of(tree, "kv_kernels/flash.py", "import flashinfer\n") == []
    (line,) = violations_of(tree, "models/flash.py", "import flashinfer\n")
    assert line == "models/flash.py:1: imports flashinfer, only kv_kernels may know a kernel vendor"


def test_a_file_that_does_not_parse_is_named(tree: Path) -> None:
    (line,) = violations_of(tree, "models/part.py", "x = 1\ndef (:\n")
    assert line.startswith("models/part.py:2: does not parse, ")


def test_a_package_that_is_not_in_the_table_is_named(tree: Path) -> None:
    (line,) = violations_of(tree, "kv_extra/__init__.py", "")
    assert line == "kv_extra/__init__.py:1: a package without a layer, add it to LAYERS"


def test_a_package_that_is_only_in_the_table_is_named(tree: Path) -> None:
    (tree / "models" / "__init__.py").unlink()
    assert [str(violation) for violation in check_sources(tree)] == [
        "models/__init__.py:1: missing, LAYERS lists the package"
    ]


@pytest.mark.parametrize("blocked", ["jax", "jaxlib", "ml_dtypes", "tokenizers"])
def test_what_the_parser_cannot_see_is_caught_by_importing(tree: Path, blocked: str) -> None:
    write(tree, "kv_control/part.py", f"import importlib\nname = {blocked!r}\nimportlib.import_module(name)\n")
    assert list(check_sources(tree)) == []
    (violation,) = check_host_imports(tree)
    assert str(violation) == f"kv_control/part.py:3: importing kv_control.part fails without jax, {blocked} is blocked"


def test_a_module_that_crashes_when_imported_is_reported_in_one_line(tree: Path) -> None:
    write(tree, "kv_common/part.py", "raise RuntimeError('no luck')\n")
    (violation,) = check_host_imports(tree)
    assert str(violation) == "kv_common/__init__.py:1: importing the package fails, RuntimeError: no luck"


def test_the_exit_status_is_one_for_any_violation(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tree)]) == 0
    assert capsys.readouterr().out == f"imports point one way in {len(LAYERS)} packages\n"
    write(tree, "kv_common/part.py", "import jax\nimport tokenizers\n")
    assert main([str(tree)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3  # two parsed, one met when imported
    assert lines[0].startswith("kv_common/part.py:1: imports jax, kv_common may import the standard library and numpy")


def test_the_real_tree_has_no_violation() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    assert [str(violation) for violation in [*check_sources(root), *check_host_imports(root)]] == []


def test_imports_are_reported_with_their_lines() -> None:
    found = list(imports_of(ast.parse("import a\n\nfrom b.c import d\n"), "kv_common"))
    assert [tuple(each) for each in found] == [(1, "a"), (3, "b.c")]
