"""Where trainer ranks meet."""

import socket
import subprocess
import sys
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from tests.strangers import NOBODY as STRANGER
from tests.strangers import needs_root
from verl.single_controller.worker import RankInfo
from verl.workers import process_group

TIMES = 5
IMPATIENT = """
import os, socket, sys
user, port = map(int, sys.argv[1:])
os.setuid(user)
print("tries", flush=True)
while True:
    one = socket.socket()
    if not one.connect_ex(("127.0.0.1", port)):
        one.recv(1)
"""


@contextmanager
def trying_to_connect(port, user):
    """Somebody who is there at the moment when there is something to connect to."""
    command = [sys.executable, "-c", IMPATIENT, str(user), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "tries\n"
            yield
        finally:
            process.kill()


@needs_root
def test_ranks_meet_though_others_try_to_connect_before_anybody_listens():
    for _ in range(TIMES):
        with socket.socket() as kept:
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind(("127.0.0.1", 0))
            info = RankInfo(group="alone", master_port=kept.getsockname()[1])
            with trying_to_connect(info.master_port, STRANGER):
                doors = process_group.join(info, "gloo", timedelta(seconds=30))
                dist.destroy_process_group()
                doors.close()
