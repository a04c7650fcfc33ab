"""Private names of other packages are used in `compat` and nowhere else, found by reading the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPAT = ("verl/compat/", "verl/checkpoint_engine/compat/")
DOCUMENTED = {"os._exit"}
"""Names with an underscore that their package documents, and that stand for nothing that may change."""
OF_NAMED_TUPLES = {"_asdict", "_replace"}
"""Likewise documented."""
OUR_PREFIX = "_verl_"
"""Of methods that other files of ours call: every worker has them, whatever its own class is called."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def attributes(tree: ast.AST) -> set[str]:
    """Names that the classes of a file give their own objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    found.add(line.name)
                targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
    return found


def is_own(value: ast.expr) -> bool:
    """`self`, `cls`, `super()`: objects of a class of the file."""
    if isinstance(value, ast.Call):
        value = value.func
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "super")


def foreign(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    """Private names in a file that are none of this project's; `ours`: what its classes have anywhere."""
    here = attributes(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if any(map(is_private, name.name.split("."))))
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] != "verl":
                yield from (
                    f"{module}.{name.name}" for name in names if any(map(is_private, [*module.split("."), name.name]))
                )
            case ast.Attribute(value=value, attr=attr) if is_private(attr) and not attr.startswith(OUR_PREFIX):
                known = OF_NAMED_TUPLES | (ours if is_own(value) else here)
                if attr not in known and ast.unparse(node) not in DOCUMENTED:
                    yield ast.unparse(node)
            case ast.Call(func=func, args=[_, ast.Constant(value=str(name)), *_]) if is_private(name):
                if ast.unparse(func) in ("getattr", "setattr", "hasattr", "delattr"):
                    yield ast.unparse(node)
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]) if "import_module" in ast.unparse(func):
                if any(map(is_private, name.split("."))):
                    yield ast.unparse(node)


def found_in(sources: dict[str, str]) -> list[str]:
    trees = {name: ast.parse(source) for name, source in sources.items()}
    ours = set[str]().union(*map(attributes, trees.values()))
    return [f"{name}: {text}" for name, tree in trees.items() for text in foreign(tree, ours)]


def test_private_names_of_other_packages_are_in_compat_alone():
    files = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "verl").rglob("*.py"))}
    assert len(files) > 300
    found = found_in(files)
    assert [line for line in found if not line.startswith(COMPAT)] == []
    assert [line for line in found if line.startswith(COMPAT)], "nothing is found where there is something"


def test_every_way_to_use_a_private_name_is_found():
    used = """
import torch._C
import torch._inductor.config as config
from ray import _raylet
from torch.distributed.fsdp._runtime_utils import reshard
from ours import _helper

def use(module, worker, options):
    module._parameters.clear()
    options._timeout = 1
    getattr(module, "_handle")
    importlib.import_module("ray._private.node")
    worker._verl_ping()
    os._exit(1)
"""
    assert set(found_in({"a.py": used})) == {
        "a.py: torch._C",
        "a.py: torch._inductor.config",
        "a.py: ray._raylet",
        "a.py: torch.distributed.fsdp._runtime_utils.reshard",
        "a.py: ours._helper",
        "a.py: module._parameters",
        "a.py: options._timeout",
        "a.py: getattr(module, '_handle')",
        "a.py: importlib.import_module('ray._private.node')",
    }


def test_names_of_our_own_classes_are_not_foreign_but_an_inherited_one_is():
    base = "class Base:\n    _kept: int\n    def _made(self):\n        self._set = 1\n"
    child = "class Child(Base, Module):\n    def use(self):\n        self._kept, self._set, super()._made()\n"
    assert found_in({"a.py": base, "b.py": child}) == []
    assert found_in({"a.py": base, "b.py": child.replace("self._set", "self._parameters")}) == [
        "b.py: self._parameters"
    ]
    assert found_in({"a.py": base, "b.py": "def use(base):\n    return base._kept\n"}) == ["b.py: base._kept"]
