from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import pytest

from verl.checkpoint_engine.support.config import ConfigError
from verl.checkpoint_engine.support.registry import Registry, require_interface


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


class Part(Protocol):
    def copy(self, shard: str) -> None:
        """Of one shard."""


class Whole(Protocol):
    def save(self, path: str, contents: Sequence[str]) -> None:
        """Both by place, or by name."""

    def part(self, dtype: str = "bfloat16", wide: Sequence[str] = ()) -> Part:
        """What it returns has an interface, too."""


class Base(ABC):
    @classmethod
    def check(cls, config: str) -> str:
        return config

    @abstractmethod
    def start(self, *, device: str) -> None:
        """By name alone."""


class Good:
    def save(self, directory: str, what: Any) -> None:
        pass

    def part(self, dtype: str = "float32", wide: Sequence[str] = (), more: int = 0) -> GoodPart:
        return GoodPart()


class GoodPart:
    def copy(self, shard: str) -> None:
        pass


class WithoutPart:
    def save(self, path: str, contents: Sequence[str]) -> None:
        pass


class OldPart(WithoutPart):
    def part(self, dtype: str = "bfloat16") -> GoodPart:
        return GoodPart()


class PartOfAnotherKind(WithoutPart):
    def part(self, dtype: str = "bfloat16", wide: Sequence[str] = ()) -> WithoutPart:
        return WithoutPart()


class OnlySays(Whole):
    def save(self, path: str, contents: Sequence[str]) -> None:
        pass


class NeverStarts(Base):
    pass


class StartsAtOnce(Base):
    def start(self) -> None:
        pass


class ChecksNothing(Base):
    def start(self, *, device: str) -> None:
        pass

    @staticmethod
    def check() -> None:
        pass


def test_a_class_that_takes_what_callers_give_has_the_interface():
    require_interface(Good, Whole, "section.key=good")


@pytest.mark.parametrize(
    ("found", "interface", "said"),
    [
        (WithoutPart, Whole, r"WithoutPart lacks the method Whole\.part\("),
        (OnlySays, Whole, r"OnlySays lacks the method Whole\.part\("),
        (OldPart, Whole, r"OldPart\.part\(.* cannot be called as Whole\.part\(.*unexpected keyword argument 'wide'"),
        (PartOfAnotherKind, Whole, r"section\.key=bad: part\(\): .*WithoutPart lacks the method Part\.copy"),
        (NeverStarts, Base, r"NeverStarts lacks the method Base\.start"),
        (StartsAtOnce, Base, r"start\(self\) .* cannot be called .*unexpected keyword argument 'device'"),
        (ChecksNothing, Base, r"check\(\) .* cannot be called as Base\.check\(config.*too many positional arguments"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_class_lacks_of_an_interface_is_named(found: type, interface: type, said: str):
    with pytest.raises(ConfigError, match=said):
        require_interface(found, interface, "section.key=bad")


def test_a_registered_class_is_held_against_the_interface_before_it_is_used():
    registry: Registry[Any] = Registry("section.key", interface=f"{__name__}:Whole")
    registry.register("good")(Good)
    registry.register("bad")(OldPart)
    registry.require("good")
    with pytest.raises(ConfigError, match=r"section\.key=bad: .*OldPart\.part"):
        registry.require("bad")
