"""Makes imports of verl's missing modules and names fail with one line that says what to write instead.

`verl/__init__.py` installs the two finders below. The tables are `modules.py` and `names.py`: data, read on first need.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING, Any

from verl.instead.names import ELSEWHERE, NAMES

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # it takes ten times as long to import as all of this

PAGE = "docs/coming-from-verl.md"


def install() -> None:
    """Install both finders. Call it once per process."""
    if not any(isinstance(finder, OfNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OfNames())
        sys.meta_path.append(OfModules())


class OfNames:
    """Before the others: modules that lack names of verl's tell so, and those whose names are elsewhere have them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in NAMES and fullname not in ELSEWHERE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if fullname in ELSEWHERE and (spec is None or spec.origin is None):  # nothing, or a directory of other files
            return ModuleSpec(fullname, _Gathered(), is_package=True)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return spec
        spec.loader = _Telling(fullname, spec.loader.path)
        return spec


class OfModules:
    """After the others: what no other has found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises ModuleNotFoundError for a module of verl's that is not here, unless somebody asks whether it is."""
        if not fullname.startswith("verl."):
            return None
        from verl.instead.modules import instead_of

        if (told := instead_of(fullname)) is None or _is_question():
            return None
        # No `name`: `from package import module` would take the error for a missing attribute, and say no more.
        raise ModuleNotFoundError(f"verl's module {fullname} is not here: {told} ({PAGE})")


def told_by(module: str, own: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
    """`__getattr__` of `module`: what `own` finds, what is elsewhere, and ImportError, which `from module import name`
    passes on, for the other names of verl's there."""

    def get(name: str) -> Any:
        if own is not None:
            try:
                return own(name)
            except AttributeError:
                pass
        if (place := ELSEWHERE.get(module, {}).get(name)) is not None:
            return getattr(importlib.import_module(place), name)
        if name in NAMES.get(module, {}):
            raise ImportError(f"verl's {name} is not in {module} here: {NAMES[module][name]} ({PAGE})")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


class _Telling(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        found = vars(module)
        # A package without files: of verl's modules below it, the finders are asked.
        found.setdefault("__path__", [])
        found["__getattr__"] = told_by(module.__name__, found.get("__getattr__"))


class _Gathered(Loader):
    """A module that has only names of other modules."""

    def create_module(self, spec: ModuleSpec) -> None:
        """As Python makes one."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__all__"] = list(ELSEWHERE[module.__name__])
        vars(module)["__getattr__"] = told_by(module.__name__)


def _is_question() -> bool:
    """Whether `importlib.util.find_spec` has called the finder: it answers None for a module that is not here."""
    import inspect  # here: it takes as long to import as all of this

    frame = inspect.currentframe()
    for _ in range(4):
        frame = frame.f_back if frame is not None else None
        if frame is not None and frame.f_code is importlib.util.find_spec.__code__:
            return True
    return False
