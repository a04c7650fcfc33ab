"""What pictures cost: `python -m benchmarks.pictures` prints it, and writes `result.json`.

A step with pictures against text of as many tokens, in the trainer and in an engine; how many pictures a processor
makes patches of; and what a batch of them takes on the driver. On CPUs, with a tiny model and pictures of 448 x 448.
Seconds are those of processor time, which other work on the machine does not use up.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import multiprocessing
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

SIDE, TOKENS = 448, 256
"""Of a picture, in pixels and in tokens."""
NUM_RESPONSE = 64


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.pictures", description=__doc__)
    parser.add_argument("--samples", type=int, default=4096, help="on the driver")
    parser.add_argument("--responses", type=int, default=8, help="of each of them")
    parser.add_argument("--batch", type=int, default=8, help="samples of the steps that are timed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/pictures"))
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as base:
        os.environ["VERL_CACHE_DIR"] = f"{base}/cache"
        result = measure(Path(base), given)
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


def measure(base: Path, given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.machine import describe_machine

    model = make_model(base / "model")
    file = make_file(base / "d.parquet", given.samples)
    fresh = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {"machine": describe_machine()}
    with ProcessPoolExecutor(1, mp_context=fresh) as alone:
        found["driver"] = alone.submit(driver, model, file, given.responses).result()
    for workers in (1, 2):
        with ProcessPoolExecutor(workers, mp_context=fresh) as pool:
            found[f"pictures_per_s_of_{workers}"] = throughput(pool, workers, model, file, 16 * given.repeats)
    with ProcessPoolExecutor(1, mp_context=fresh) as alone:
        found["step"] = alone.submit(steps, model, file, given.batch, given.repeats).result()
    return found


def make_model(directory: Path) -> Path:
    """A tiny one with random weights that makes `TOKENS` of such a picture."""
    from verl.utils.builtin.seeing import make_tiny_seeing_model

    make_tiny_seeing_model(directory, hidden_size=128, layers=3, depth=2, vision_hidden_size=64)
    file = directory / "preprocessor_config.json"
    described = json.loads(file.read_text())
    described["size"]["longest_edge"] = SIDE * SIDE
    file.write_text(json.dumps(described))
    return directory


def make_file(path: Path, count: int) -> Path:
    """Each row has a picture of its own, as JPEG."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    chooser, rows = np.random.default_rng(0), []
    for number in range(count):
        small = Image.fromarray(chooser.integers(0, 255, (28, 28, 3), dtype=np.uint8))
        written = io.BytesIO()
        small.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(written, format="JPEG")
        rows.append(
            {
                "data_source": "s",
                "prompt": [{"role": "user", "content": "<image>?"}],
                "images": [{"bytes": written.getvalue(), "path": None}],
                "reward_model": {"style": "rule", "ground_truth": "1"},
                "extra_info": {"index": number},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=256)
    return path


def data_of(model: Path, file: Path) -> Any:
    from transformers import AutoConfig, AutoTokenizer

    from verl.utils.dataset import RLHFDataset
    from verl.utils.pictures import load_processor
    from verl.workers.config import DataConfig

    processor = load_processor(model, AutoConfig.from_pretrained(model))
    return RLHFDataset(file, AutoTokenizer.from_pretrained(model), DataConfig(max_prompt_length=2 * TOKENS), processor)


def driver(model: Path, file: Path, responses: int) -> dict[str, Any]:
    """In a process of its own: its memory while it reads the file, and has all samples in one batch."""
    from verl.protocol import DataProto
    from verl.utils.dataset import PromptLoader
    from verl.workers.config import DataConfig

    data_of(model, make_file(file.with_name("small.parquet"), 4))  # imports, and the first picture of a size
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    started = time.process_time()
    data = data_of(model, file)
    seconds = time.process_time() - started
    (rows,) = PromptLoader(data, DataConfig(), batch_size=len(data), shuffle=True)
    batch = DataProto.from_dict(non_tensors=rows).repeat(responses)
    sent = len(pickle.dumps(batch))
    patches = data.processor.inputs(data[0]["multi_modal_data"]["images"])
    nbytes = sum(tensor.nbytes for tensor in patches.values())
    return {
        "samples": len(data),
        "seconds": seconds,
        "grown_mb": (resident() - before) / 1e6,
        "most_grown_mb": (resident("VmHWM") - before) / 1e6,
        "nbytes_sent_of_a_response": sent / len(batch),
        "nbytes_of_patches": nbytes,
        "gb_of_patches_of_the_batch": nbytes * len(batch) / 1e9,
    }


def resident(field: str = "VmRSS") -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def throughput(pool: ProcessPoolExecutor, workers: int, model: Path, file: Path, count: int) -> float:
    """Pictures that all workers decode and make into patches, none twice, in a second of processor time of each."""
    list(pool.map(compute, [model] * workers, [file] * workers, [range(1)] * workers))
    parts = [range(1 + worker * count, 1 + (worker + 1) * count) for worker in range(workers)]
    return workers * count / max(pool.map(compute, [model] * workers, [file] * workers, parts))


_known: list[Any] = []


def compute(model: Path, file: Path, numbers: Sequence[int]) -> float:
    """Seconds of processor time."""
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoConfig

    from verl.utils.pictures import keep, load_processor

    torch.set_num_threads(1)
    if not _known:
        _known.append(load_processor(model, AutoConfig.from_pretrained(model)))
        _known.append([keep(each[0]["bytes"]) for each in pq.read_table(file)["images"].to_pylist()])
    processor, pictures = _known
    started = time.process_time()
    for number in numbers:
        processor.inputs([pictures[number % len(pictures)]])
    return time.process_time() - started


def steps(model: Path, file: Path, count: int, repeats: int) -> dict[str, Any]:
    """In a process of its own, one rank and one thread: seconds of processor time with pictures, and with text of as
    many tokens."""
    import torch
    import torch.distributed as dist

    from verl.experimental.agent_loop.batching import to_batch
    from verl.experimental.agent_loop.output import AgentLoopOutput
    from verl.utils.pictures import MULTI_MODAL_DATA
    from verl.workers.config import FSDPConfig, HFModelConfig, OptimizerConfig
    from verl.workers.engine.micro_batches import MicroBatchLimits
    from verl.workers.engine.registry import TrainEngineRegistry

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{model}.rendezvous", rank=0, world_size=1)
    engine = TrainEngineRegistry.get("fsdp2")(
        model_config=HFModelConfig(path=str(model), use_remove_padding=True),
        fsdp_config=FSDPConfig(dtype="float32"),
        optim_config=OptimizerConfig(lr=1e-6),
        grad_clip=1.0,
    )
    engine.build()
    data = data_of(model, file)
    items = [data[number] for number in range(count)]
    found: dict[str, Any] = {"samples": count, "tokens": len(items[0]["prompt_ids"]) + NUM_RESPONSE}
    for name in ("text", "pictures"):
        prompts = [[7] * len(item["prompt_ids"]) if name == "text" else item["prompt_ids"] for item in items]
        said = [9] * NUM_RESPONSE
        outputs = [AgentLoopOutput(prompt_ids=ids, response_ids=said, response_mask=[1] * len(said)) for ids in prompts]
        batch = to_batch(outputs, prompt_length=2 * TOKENS, response_length=NUM_RESPONSE, pad_token_id=0)
        pictures = [item[MULTI_MODAL_DATA]["images"] if name == "pictures" else [] for item in items]
        if name == "pictures":
            batch.non_tensor_batch[MULTI_MODAL_DATA] = np.array([{"images": each} for each in pictures], dtype=object)
        limits = MicroBatchLimits(max_tokens=4 * (2 * TOKENS))

        def score(batch: Any = batch, limits: Any = limits) -> Any:
            return engine.compute_log_prob(batch, temperature=1.0, limits=limits)

        def train(batch: Any = batch, limits: Any = limits) -> Any:
            return engine.train_mini_batch(batch, loss, temperature=1.0, limits=limits)

        score(), train()
        found[name] = {
            "log_probs_s": median_of(score, repeats),
            "update_s": median_of(train, repeats),
            "rollout_s": asyncio.run(generated(model, prompts, pictures, repeats)),
        }
    return found


def loss(log_prob: Any, entropy: Any, micro_batch: Any, totals: Any) -> Any:
    return -log_prob.sum() / totals.num_tokens, {}


def median_of(work: Callable[[], Any], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        seconds.append(time.process_time() - started)
    return statistics.median(seconds)


async def generated(model: Path, prompts: Sequence[Any], pictures: Sequence[Any], repeats: int) -> float:
    """Seconds of processor time in which the engine of transformers says `NUM_RESPONSE` tokens to all prompts."""
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.engine import EngineSpec
    from verl.workers.rollout.hf.engine import HFEngine
    from verl.workers.rollout.records import SamplingOptions

    config = RolloutConfig(name="hf", dtype="float32", load_format="auto")
    spec = EngineSpec(
        name="e",
        engine="",
        config=config,
        model=HFModelConfig(path=str(model)),
        device="cpu",
        max_model_len=1024,
        seed=0,
    )
    engine = HFEngine(spec)
    await engine.start()
    options, seconds = SamplingOptions(max_tokens=NUM_RESPONSE, ignore_eos=True), []
    for repeat in range(1 + repeats):
        started = time.process_time()
        await asyncio.gather(
            *(
                engine.generate(ids, options, f"{repeat}-{number}", own)
                for number, (ids, own) in enumerate(zip(prompts, pictures, strict=True))
            )
        )
        seconds.append(time.process_time() - started)
    await engine.shutdown()
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    sys.exit(main())
