"""Conversations of verl's agent loops with a server that says what a script has it say.

{tools, cases} comes in as JSON; a case is {tokenizer, model_type, loop, prompt, says, lengths, multi_turn, truncation,
arguments}. Each gives {prompt_ids, response_ids, response_mask, num_turns, tensors, rules}, or {error}; `rules` is the
class that writes what is between turns. Run as a file with PyPI's verl in front.
"""

import asyncio
import copy
import json
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.tools.tool_registry import initialize_tools_from_config

import verl
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker, DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

DEFAULTS = Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
TENSORS = ("prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids")


class Server:
    def __init__(self, tokenizer: Any, says: list[str]) -> None:
        self.says = [tokenizer.encode(text, add_special_tokens=False) for text in says]

    async def generate(self, request_id: str, **_: Any) -> TokenOutput:
        return TokenOutput(token_ids=self.says.pop(0), stop_reason="completed")


class Worker(AgentLoopWorker):
    """Puts what a loop returns into tensors; nothing else of it is there."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def __getattr__(self, name: str) -> None:
        return None


async def said(case: dict[str, Any], given: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    config = copy.deepcopy(given["config"])
    config.actor_rollout_ref.model.path = case["tokenizer"]
    rollout = config.actor_rollout_ref.rollout
    rollout.prompt_length, rollout.response_length = case["lengths"]
    rollout.multi_turn.update(case["multi_turn"])
    config.data.truncation = case["truncation"]
    config.data.apply_chat_template_kwargs = case["arguments"]
    more: dict[str, Any] = {"hf_model_type": case["model_type"]} if case["model_type"] else {}
    if case["loop"] == "tool_agent":
        more["tools"] = ToolListWrap(initialize_tools_from_config(given["tools"]))
    loop = (ToolAgentLoop if "tools" in more else SingleTurnAgentLoop)(
        trainer_config=DictConfigWrap(config),
        server_manager=Server(tokenizer, case["says"]),
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
        **more,
    )
    try:
        output = await loop.run({}, raw_prompt=case["prompt"], tools_kwargs={})
    except Exception as exc:  # noqa: BLE001 - that it raises is a result, too
        return {"error": type(exc).__name__}
    found = output.model_dump(include={"prompt_ids", "response_ids", "response_mask", "num_turns"})
    worker = Worker(config=config, rollout_config=rollout, tokenizer=tokenizer, mm_processor_kwargs={})
    padded = await worker._agent_loop_postprocess(output, False, raw_prompt=case["prompt"])
    batch = worker._postprocess([padded], {}).batch
    rules = type(loop.continuous_token_builder).__name__
    return found | {"rules": rules, "tensors": {name: batch[name][0].tolist() for name in TENSORS}}


async def main() -> list[dict[str, Any]]:
    given = json.load(sys.stdin) | {"config": OmegaConf.load(DEFAULTS)}
    tokenizers = {path: AutoTokenizer.from_pretrained(path) for path in {case["tokenizer"] for case in given["cases"]}}
    return [await said(case, given, tokenizers[case["tokenizer"]]) for case in given["cases"]]


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(asyncio.run(main())))
