r"""A training loop of one's own that keeps running vLLM servers up to date. Neither Ray nor a trainer of this project.

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL \
        --gpu-memory-utilization 0.5 --weight-transfer-config '{"backend": "verl_arena"}'
    python examples/any_trainer/train.py MODEL http://127.0.0.1:8000
    torchrun --nproc-per-node 2 examples/any_trainer/train.py MODEL http://127.0.0.1:8000       # FSDP2

MODEL is a Hugging Face directory. The loop teaches it to count.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from verl.checkpoint_engine import WeightPublisher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a Hugging Face model")
    parser.add_argument("endpoints", nargs="+", help="URLs of vLLM servers on this host")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    arguments = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)

    with WeightPublisher(model, endpoints=arguments.endpoints) as publisher:
        for step in range(arguments.steps):
            tokens = torch.arange(32).repeat(4, 1) + step
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

            report = publisher.push(version=step)
            if publisher.is_first_rank:
                print(f"step {step}: loss {loss.item():.3f}, served after {report.total_s:.2f} s")

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
