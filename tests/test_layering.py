"""The tree is the architecture: lower layers never import higher ones, and importing is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import hotset

PACKAGE = Path(hotset.__file__).parent

# low to high; packages in one row may import each other's public modules unless FORBIDDEN says otherwise
LAYERS = [
    {"errors"},
    {"units", "core"},
    {"storage"},
    {"models"},
    {"traces", "machines", "ops", "kernels"},
    {"residency"},
    {"adaptation"},
    {"planning", "policies"},
    {"simulation", "runtime"},
    {"reports"},
    {"demo", "bench"},
    {"__init__"},
    {"cli", "__main__"},
]
FORBIDDEN = {("simulation", "runtime"), ("runtime", "simulation")}
# the nouns open and save themselves: deferred imports, so that importing core stays free of file formats
DEFERRED = {("core", "traces"), ("core", "planning"), ("core", "machines")}


def _rank(unit: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if unit in layer)


def _unit(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hotset":
            if node.module == "hotset":
                found |= {a.name if a.name in _units() else "__init__" for a in node.names}
            else:
                found.add(_unit(node.module))
        elif isinstance(node, ast.Import):
            found |= {_unit(a.name) for a in node.names if a.name.split(".")[0] == "hotset"}
    return found


def _units() -> set[str]:
    return {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}


def test_every_module_has_a_layer() -> None:
    assert _units() == set().union(*LAYERS)


def test_lower_layers_never_import_higher_ones() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE)
        unit = relative.parts[0].removesuffix(".py")
        for used in _imports(path):
            if used == unit or (unit, used) in DEFERRED:
                continue
            if _rank(used) > _rank(unit) or (unit, used) in FORBIDDEN:
                wrong.append(f"{relative} imports hotset.{used}")
    assert wrong == []


def test_import_and_help_load_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'numba', 'matplotlib', 'scipy', 'accelerate'}"
    code = f"""
import sys
import hotset
from hotset.cli.main import build_app
try:
    build_app()(["--help"])
except SystemExit:
    pass
found = sorted({heavy} & set(sys.modules))
sys.exit(f"loaded {{found}}" if found else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
