"""What a rank has registered says so, at an address that peers read, and no longer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch

from verl.checkpoint_engine.backends.tcp import TcpWire
from verl.checkpoint_engine.errors import BackendUnavailable, ConfigError
from verl.checkpoint_engine.links.stamps import Stamp
from verl.checkpoint_engine.links.wire import Wire
from verl.checkpoint_engine.parameter_server.holdings import Holdings
from verl.checkpoint_engine.parameter_server.records import RankMetas

WEIGHTS = {"w": torch.arange(1000.0)}


class Counting(TcpWire):
    """Knows how much memory is registered."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1", 1)

    @property
    def served(self) -> int:
        return len(self._registered)


def holdings_over(new_wire: Callable[[], Wire]) -> Holdings:
    return Holdings(rank=0, world_size=1, device_id="cpu-0", rdma_device="", new_wire=new_wire)


def shown(metas: RankMetas) -> int:
    """The version in the stamp."""
    words = (ctypes.c_int64 * (Stamp.NBYTES // 8)).from_address(metas.stamp)
    return words[2]


def test_a_stamp_shows_the_number_of_a_checkpoint_until_that_is_unregistered():
    wire = Counting()
    holdings = holdings_over(lambda: wire)
    for name in ("one", "two"):
        holdings.register(name, [], WEIGHTS)
    one, two = holdings.metas("one"), holdings.metas("two")
    assert (shown(one), shown(two)) == (one.incarnation, two.incarnation)
    assert one.incarnation != two.incarnation
    served = wire.served
    holdings.unregister("one", keep_memory=True)
    assert shown(one) == Stamp.WRITING
    for _ in range(3):
        holdings.register("three", [], WEIGHTS)
        three = holdings.metas("three")
        assert shown(three) == three.incarnation != one.incarnation
        assert shown(one) != one.incarnation
        assert wire.served == served
        holdings.unregister("three", keep_memory=True)
    assert shown(two) == two.incarnation
    holdings.close()


def test_a_rank_that_cannot_serve_tells_no_address_and_holds_all_the_same():
    def no_wire() -> Wire:
        raise BackendUnavailable("the P2P store needs Mooncake")

    holdings = holdings_over(no_wire)
    holdings.register("one", [], WEIGHTS)
    metas = holdings.metas("one")
    assert metas.p2p_address == ""
    assert metas.incarnation != 0
    assert [tensor.name for buffer in metas.buffers for tensor in buffer.tensors] == ["w"]
    holdings.unregister("one", keep_memory=True)
    assert holdings.metas("one").incarnation == 0
    with pytest.raises(ConfigError, match="'one' is not registered on rank 0; registered: none"):
        holdings.unregister("one", keep_memory=True)
