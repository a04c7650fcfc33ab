"""One of two ranks that publish; rank 1 ends between two pushes. Rank 0 says what its second push raised."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from verl.checkpoint_engine import SyncAborted, TransportError, WeightPublisher

directory, url = sys.argv[1:]
dist.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(directory)
fully_shard(model)
with torch.no_grad():
    for parameter in model.parameters():
        parameter *= 1.01
publisher = WeightPublisher(model, [url])
publisher.push(1)
if dist.get_rank() == 1:
    os._exit(0)
began_s = time.monotonic()
try:
    publisher.push(2)
except (SyncAborted, TransportError) as exc:
    print(f"{type(exc).__name__} after {time.monotonic() - began_s:.0f} s: {exc}", flush=True)
os._exit(0)
