"""Routes of SGLang, without a server."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from verl.checkpoint_engine.conformance.routes import Route
from verl.checkpoint_engine.conformance.sglang_routes import SGLangDistributedRoute, SGLangTensorRoute, in_chunks
from verl.checkpoint_engine.errors import ConfigError


@pytest.mark.parametrize("route", [SGLangTensorRoute, SGLangDistributedRoute])
def test_chunks_for_a_server_that_is_not_paused_are_refused(route: Callable[..., Route]):
    with pytest.raises(ConfigError, match="--pause-mode abort, or keep"):
        route("http://127.0.0.1:9", timeout_s=1, pause_mode="wait").check()


def test_a_load_has_several_chunks_and_a_large_tensor_one_of_its_own():
    small, large = torch.zeros(10), torch.zeros(100)
    chunks = in_chunks([("a", small), ("b", small), ("c", large), ("d", small), ("e", small)])
    assert [[name for name, _ in chunk] for chunk in chunks] == [["a", "b"], ["c"], ["d", "e"]]
    assert [[name for name, _ in chunk] for chunk in in_chunks([("a", small)])] == [["a"]]
