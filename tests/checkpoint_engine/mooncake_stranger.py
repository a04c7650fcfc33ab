"""`python mooncake_stranger.py USER read|write HOST:PORT ADDRESS`: what Mooncake lets USER do with 24 bytes there."""

import os
import sys
import time

import numpy as np

os.environ["MC_LOG_LEVEL"] = "FATAL"
from mooncake.engine import TransferEngine


def main(user: str, what: str, peer: str, address: str) -> str:
    os.setuid(int(user))
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = np.full(24, 0x5A, np.uint8)
    assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
    transfer = engine.batch_transfer_async_read if what == "read" else engine.batch_transfer_async_write
    batch = transfer(peer, [memory.ctypes.data], [int(address)], [memory.nbytes])
    if batch in (0, 2**64 - 1):
        return "cannot be reached"
    deadline = time.monotonic() + 60
    while (status := engine.transfer_check_status(batch)) == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    return {1: "done", 0: "nothing happens"}.get(status, "failed")


if __name__ == "__main__":
    answer = main(*sys.argv[1:])
    os.write(1, answer.encode())
    os._exit(0)
