"""Checks that imports between the packages point one way, and that the control plane needs no jax.

`LAYERS` is the rule: what each package may import. Sources are parsed, so an import inside a function, under
TYPE_CHECKING, relative, or through `importlib.import_module("literal")` counts like any other. The packages marked
`host_only` are imported as well, in a subprocess where jax and its companions cannot be imported, which also covers
what they would reach through numpy or each other. Prints one line per violation and exits 1 if there is any.
"""

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

KERNEL_VENDORS = frozenset({"jax_aiter", "jax_tvm_ffi", "tvm_ffi", "flashinfer"})
UNREACHABLE_FROM_HOST = ("jax", "jaxlib", "ml_dtypes", "tokenizers")


@dataclass(frozen=True, slots=True)
class Layer:
    """What a package may import besides itself and the standard library."""

    ours: frozenset[str]
    libraries: frozenset[str]
    host_only: bool = False


def _layer(ours: str, libraries: str, host_only: bool = False) -> Layer:
    return Layer(frozenset(ours.split()), frozenset(libraries.split()), host_only)


LAYERS: dict[str, Layer] = {
    "kv_common": _layer("", "numpy", host_only=True),
    "kv_control": _layer("kv_common", "numpy", host_only=True),
    "kv_kernels": _layer("kv_common", f"numpy jax {' '.join(KERNEL_VENDORS)}"),
    "models": _layer("kv_common kv_kernels", "numpy jax safetensors gguf tokenizers jinja2 huggingface_hub ml_dtypes"),
    "kv_execution": _layer("kv_common kv_control kv_kernels", "numpy jax"),
    "kv_serving": _layer(
        "kv_common kv_control kv_kernels models kv_execution kv_export",
        "numpy jax typer click rich fastapi starlette pydantic uvicorn prometheus_client llguidance ray opentelemetry",
    ),
    "kv_export": _layer(
        "kv_common kv_control kv_kernels models kv_execution", "numpy jax ml_dtypes onnx onnxruntime flatbuffers"
    ),
}


class Violation(NamedTuple):
    """One broken rule: where, what was imported (or went wrong), and why that is not allowed."""

    path: str
    line: int
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}, {self.why}"


class Import(NamedTuple):
    """A dotted module name that a source line imports."""

    line: int
    target: str


def imports_of(tree: ast.Module, package: str) -> Iterator[Import]:
    """Every import in a module of `package` (dotted), wherever in the module it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            yield from _import_from(node, package)
        elif isinstance(node, ast.Call) and (name := _dynamic_import(node, package)) is not None:
            yield Import(node.lineno, name)


def _import_from(node: ast.ImportFrom, package: str) -> Iterator[Import]:
    base = _absolute("." * node.level + (node.module or ""), package)
    if base:
        yield Import(node.lineno, base)
        return
    # `from .. import name` at the top of the tree: the names are packages themselves.
    for alias in node.names:
        yield Import(node.lineno, alias.name)


def _dynamic_import(node: ast.Call, package: str) -> str | None:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    if name not in ("import_module", "__import__"):
        return None
    arguments = {"name": node.args[0]} if node.args else {}
    arguments |= {"package": node.args[1]} if len(node.args) > 1 and name == "import_module" else {}
    arguments |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    target = _literal(arguments.get("name"))
    return None if target is None else _absolute(target, _literal(arguments.get("package")) or package)


def _literal(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _absolute(name: str, package: str) -> str:
    """`name` with its leading dots resolved against the dotted `package`; "" when they lead out of it."""
    relative = name.lstrip(".")
    level = len(name) - len(relative)
    if level == 0:
        return name
    parents = package.split(".")
    kept = parents[: max(0, len(parents) - level + 1)]
    return ".".join([*kept, relative] if relative else kept)


def why_not(package: str, target: str) -> str | None:
    """The reason that a module of `package` may not import the dotted `target`, or None if it may."""
    layer, root = LAYERS[package], target.partition(".")[0]
    if root == package or root in layer.ours or root in layer.libraries:
        return None
    if root in LAYERS:
        allowed = ", ".join(name for name in LAYERS if name in layer.ours) or "none"
        return f"of our packages {package} may import {allowed}"
    if root in KERNEL_VENDORS:
        return "only kv_kernels may know a kernel vendor"
    if root in sys.stdlib_module_names:
        return None
    return f"{package} may import the standard library and {', '.join(sorted(layer.libraries))}"


def check_sources(root: Path) -> Iterator[Violation]:
    """Violations in the parsed sources of every package in the tree at `root`."""
    for init in sorted(root.glob("*/__init__.py")):
        if init.parent.name not in LAYERS:
            yield Violation(f"{init.parent.name}/__init__.py", 1, "a package without a layer", "add it to LAYERS")
    for package in LAYERS:
        if not (root / package / "__init__.py").is_file():
            yield Violation(f"{package}/__init__.py", 1, "missing", "LAYERS lists the package")
        for path in sorted((root / package).rglob("*.py")):
            yield from _check_file(root, path)


def _check_file(root: Path, path: Path) -> Iterator[Violation]:
    relative = path.relative_to(root)
    package = ".".join(relative.parent.parts)
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        yield Violation(str(relative), error.lineno or 1, "does not parse", error.msg)
        return
    for line, target in sorted(imports_of(tree, package)):
        if (reason := why_not(relative.parts[0], target)) is not None:
            yield Violation(str(relative), line, f"imports {target}", reason)


# Runs in the subprocess: refuses the blocked names and imports each module, reporting the deepest line of ours. Only
# the interpreter's own finders stay, since an editable install's would answer for our packages from another tree.
_IMPORT_ALL = """
import importlib, json, sys, traceback
root, modules, blocked = json.loads(sys.argv[1])
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(name + " is blocked")
own = [finder for finder in sys.meta_path if finder.__module__.startswith("_frozen_importlib")]
sys.meta_path[:] = [Refuse(), *own]
sys.path.insert(0, root)
for module in modules:
    try:
        importlib.import_module(module)
    except ImportError as error:
        ours = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(root)]
        where = (ours[-1].filename[len(root) + 1:], ours[-1].lineno) if ours else (module, 1)
        print(json.dumps([*where, module, str(error)]))
"""


def check_host_imports(root: Path) -> Iterator[Violation]:
    """Violations found by importing every module of the host-only packages where jax cannot be imported."""
    for package in (name for name, layer in LAYERS.items() if layer.host_only):
        paths = [path.relative_to(root) for path in sorted((root / package).rglob("*.py"))]
        modules = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
        task = json.dumps([str(root.resolve()), modules, UNREACHABLE_FROM_HOST])
        child = subprocess.run([sys.executable, "-c", _IMPORT_ALL, task], capture_output=True, text=True, check=False)
        for line in child.stdout.splitlines():
            path, number, module, message = json.loads(line)
            yield Violation(path, number, f"importing {module} fails without jax", message)
        if child.returncode:
            last_line = (child.stderr.splitlines() or ["no output"])[-1]
            yield Violation(f"{package}/__init__.py", 1, "importing the package fails", last_line)


def main(arguments: list[str] | None = None) -> int:
    """Checks the tree (by default the one that this file is in), prints the violations, returns the exit status."""
    parser = argparse.ArgumentParser(description="Check that imports between the packages point one way.")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args(arguments).root
    violations = [*check_sources(root), *check_host_imports(root)]
    for violation in violations:
        print(violation)
    if not violations:
        print(f"imports point one way in {len(LAYERS)} packages")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
