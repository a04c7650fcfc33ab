"""Built-in models and data for this package's tests."""

import shutil

import pytest

from verl.utils.builtin import builtin_data, builtin_model, make_tiny_model


@pytest.fixture(scope="session")
def builtin_model_dir():
    """The built-in model in the user's cache: the first session on a machine makes it, about half a minute."""
    return builtin_model("builtin:tiny-qwen2")


@pytest.fixture(scope="session")
def builtin_files():
    return {split: builtin_data("builtin:arithmetic", split) for split in ("train", "test")}


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def model_dir(tiny_model_dir, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(tiny_model_dir, tmp_path / "model")
