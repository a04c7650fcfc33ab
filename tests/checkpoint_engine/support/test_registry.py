import pytest

from verl.checkpoint_engine.support.config import ConfigError
from verl.checkpoint_engine.support.registry import Registry


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
