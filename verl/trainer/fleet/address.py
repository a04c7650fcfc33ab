"""The address of the Ray that a run joins. Imports no Ray, so that `--check` may ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl import envs

KEY = "ray_kwargs.ray_init"
LOCAL = "local"
"""Ray's address that means: start a new Ray and join none."""


def address_of(arguments: Mapping[str, Any]) -> tuple[str, str]:
    """The address of Ray for these arguments of `ray.init`, and what sets it; `local` means a new Ray.

    Without an address in the arguments, uses `RAY_ADDRESS`, which `ray job submit` sets.
    """
    if arguments.get("address"):
        return str(arguments["address"]), f"{KEY}.address"
    return (envs.ray_address(), "RAY_ADDRESS") if envs.ray_address() else (LOCAL, "default")
