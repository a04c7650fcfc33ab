from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import pytest

from verl.checkpoint_engine.support.config import ConfigError
from verl.checkpoint_engine.support.registry import Registry, require_methods, require_subclass


def test_a_registered_function_is_found_by_its_name():
    registry = Registry("section.key")

    @registry.register("double")
    def double(x):
        return 2 * x

    assert registry.get("double")(3) == 6
    assert registry.names() == ["double"]
    registry.register("double")(double)  # a reloaded module registers again


def test_an_unknown_name_is_an_error_with_the_key_and_what_is_known():
    with pytest.raises(ConfigError, match=r"section.key='x' is not registered. Known: none"):
        Registry("section.key").get("x")


def test_of_many_names_the_nearest_three_are_told():
    registry = Registry("section.key")
    for number in range(150):
        registry.register(f"ring-{number}")(number)
    with pytest.raises(ConfigError, match=r"The nearest of 150: ring-17, ring-1\d*, ring-\d+\.$"):
        registry.get("17")


class Engine(Protocol):
    def load(self, path: str, *, strict: bool) -> None: ...
    def save(self, path: str, kept: Sequence[str] = ()) -> None: ...


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"load": lambda self, path, *, strict: None}, "has no method save"),
        ({"load": lambda self, path, strict: None, "save": lambda self, path: None}, "'kept'. Engine has save"),
        (
            {"load": lambda self, path, strict, more: None, "save": lambda self, path, kept: None},
            "'more'. Engine has load",
        ),
        ({"load": lambda self, where, **rest: None, "save": lambda self, path, kept=None, more=1: None}, None),
    ],
)
def test_a_class_has_the_methods_and_arguments_of_its_protocol(members: dict[str, Any], said: str | None):
    found = type("Mine", (), members)
    if said is None:
        require_methods(found, Engine, "strategy=mine")
    else:
        with pytest.raises(ConfigError, match=f"^strategy=mine: .*Mine.*{said}"):
            require_methods(found, Engine, "strategy=mine")


class Backend(ABC):
    size: int

    @abstractmethod
    def send(self, version: int, *, slot: str) -> None: ...

    @classmethod  # noqa: B027 - a backend need not have one
    def check_host(cls, config: str) -> None: ...


class Whole(Backend):
    size = 1

    def send(self, version, *, slot, more=None): ...


class LacksMethod(Backend):
    size = 1


class LacksAttribute(Backend):
    def send(self, version, *, slot): ...


class OtherArguments(Whole):
    def send(self, version): ...


class OtherClassMethod(Whole):
    @classmethod
    def check_host(cls): ...


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Whole, None),
        (int, r"builtins\.int is no subclass of .*Backend$"),
        (lambda: None, "is no subclass of"),
        (LacksMethod, "LacksMethod lacks send of .*Backend$"),
        (LacksAttribute, "LacksAttribute lacks size of .*Backend$"),
        (OtherArguments, r"OtherArguments\.send\(self, version\): .*'slot'"),
        (OtherClassMethod, r"OtherClassMethod\.check_host\(\): too many positional arguments"),
    ],
)
def test_a_class_that_is_not_whole_is_refused_with_what_it_lacks(found, said):
    if said is None:
        require_subclass(found, Backend, "backend=mine", ("size",))
    else:
        with pytest.raises(ConfigError, match=f"^backend=mine: .*{said}"):
            require_subclass(found, Backend, "backend=mine", ("size",))
