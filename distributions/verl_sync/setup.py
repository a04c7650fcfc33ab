"""Which packages there are. Everything else is in pyproject.toml, which cannot look for them under another name."""

from setuptools import find_packages, setup

ENGINE = "../../verl/checkpoint_engine"

setup(
    packages=["verl_sync", *(f"verl_sync.{name}" for name in find_packages(ENGINE)), "verl_sync.for_verl"],
    package_dir={"verl_sync": ENGINE, "verl_sync.for_verl": "for_verl"},
)
