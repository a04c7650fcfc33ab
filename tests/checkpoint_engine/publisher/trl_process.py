"""TRL's AsyncGRPOTrainer, which pushes through ours into a vLLM server that is there.

    python -m tests.checkpoint_engine.publisher.trl_process MODEL URL SERVED OUTPUT

TRL is on the path, with a stand-in for a kernel that it has for CUDA devices alone. Prints a list of JSON records, one
for each push: see `Pushed`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEPS = 3
PROMPT = [3, 4, 5, 6, 7, 8, 9, 10]


@dataclass
class Pushed:
    version: int
    """Which the server says that it serves."""
    different: list[str]
    """What it computes with other than the trainer's."""
    distance: float
    """Of its log-probs of PROMPT from those of the trainer's model, at the token where it is largest."""
    distance_before: float
    """From those of the model before the step."""
    moved: int
    """Tensors of the model that the step has changed."""


def lengths(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs among responses: TRL wants a function that another process can import."""
    return [float(len(set(ids))) for ids in completion_ids]


def main() -> None:
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    from verl.checkpoint_engine import TRLWeightTransfer

    torch.cuda.get_device_name = lambda device=None: "none"  # by which TRL looks up how fast it is
    model, url, served, output = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        Path(trl.__file__).parent / "chat_templates/qwen3.jinja"
    ).read_text()  # one that TRL knows
    prompts = [[{"role": "user", "content": f"{one}+{one}"}] for one in range(16)]
    transfer = TRLWeightTransfer([url])
    trainer = AsyncGRPOTrainer(
        model=model,
        reward_funcs=lengths,
        args=AsyncGRPOConfig(
            output_dir=output,
            vllm_server_base_url=url,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=16,
            learning_rate=1e-2,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        weight_transfer=transfer,
    )
    watch = _watch(Path(model), url, Path(served), transfer)
    trainer.add_callback(watch)  # after TRL's own, which push
    trainer.train()
    sys.stdout.write("\n" + json.dumps([asdict(one) for one in watch.pushed]))


def _watch(directory: Path, url: str, served: Path, transfer: Any) -> Any:
    import torch
    from transformers import AutoConfig, TrainerCallback

    from tests.checkpoint_engine.served_vllm import ServedVLLM
    from tests.weight_sync.expected import expected_on_rank, same_bits

    server = ServedVLLM(url, directory, served)

    def log_probs(model: Any) -> torch.Tensor:
        ids = torch.tensor([PROMPT])
        with torch.inference_mode():
            all_of_them = model(ids).logits[0, :-1].log_softmax(-1)
        return all_of_them.gather(-1, ids[0, 1:, None])[:, 0]

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self.pushed: list[Pushed] = []
            self._before: dict[str, torch.Tensor] = {}

        def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            self._look(named["model"])

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            self._look(named["model"])

        def _look(self, model: Any) -> None:
            from transformers import AutoModelForCausalLM

            now = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            before, self._before = self._before or now, now
            plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
            distances = []
            said = server.log_probs(PROMPT)
            for weights in (now, before):
                plain.load_state_dict(weights)
                distances.append(float((log_probs(plain) - torch.tensor(said)).abs().max()))
            expected = expected_on_rank(now, AutoConfig.from_pretrained(directory), 0, 1)
            found = server.weights()
            self.pushed.append(
                Pushed(
                    version=int(server.version()),
                    different=[name for name, tensor in expected.items() if not same_bits(found[name], tensor)],
                    distance=distances[0],
                    distance_before=distances[1],
                    moved=sum(not torch.equal(now[name], before[name]) for name in now),
                )
            )

    return Watch()


if __name__ == "__main__":
    main()
