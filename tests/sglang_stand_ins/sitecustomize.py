"""Stand-ins for packages that SGLang imports and that an engine on CPU never calls: kernels for accelerators, images,
sounds.

With this directory in PYTHONPATH every process of an engine has them, unless the package itself is installed. What they
hold is made when it is asked for: a class for a name with a capital letter, else something that can be called.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from unittest.mock import MagicMock

PACKAGES = ("IPython", "gguf", "sgl_kernel", "soundfile", "torchvision", "traitlets", "triton")


class AnyClass(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class StandIns(MetaPathFinder, Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in PACKAGES else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        def make(name):
            if name.startswith("__"):
                raise AttributeError(name)
            is_class = name[0].isupper()
            made = AnyClass(name, (), {"__init__": lambda *args, **kwargs: None}) if is_class else MagicMock(name=name)
            setattr(module, name, made)
            return made

        module.__getattr__ = make
        module.__version__ = "99.0"
        if module.__name__ == "triton":
            import_module("triton.runtime")
        if module.__name__ == "triton.runtime":
            module.driver = SimpleNamespace(active=SimpleNamespace(get_current_target=no_driver))


def no_driver():
    """What Triton says on a machine without an accelerator, and SGLang then takes for a CPU."""
    raise RuntimeError("0 active drivers")


sys.meta_path.append(StandIns())
