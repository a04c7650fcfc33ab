"""A vLLM engine that loads a model's directory and quantizes it, and what it says to PROMPT.

    python -m tests.workers.rollout.quantized_process MODEL RESPONSE_LENGTH TOKEN ...

Prints a JSON object: `tokens`, chosen greedily, and their `log_probs`. Ours has no part in it.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from verl.workers.rollout.vllm.engine import QUANTIZATION

    model, length, *prompt = sys.argv[1:]
    engine = LLM(
        model=model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        kv_cache_memory_bytes=10**8,
        distributed_executor_backend="uni",
        **QUANTIZATION["fp8"],
    )
    sampling = SamplingParams(temperature=0, max_tokens=int(length), ignore_eos=True, logprobs=0, detokenize=False)
    (output,) = engine.generate([TokensPrompt(prompt_token_ids=list(map(int, prompt)))], sampling, use_tqdm=False)
    answer = output.outputs[0]
    log_probs = [place[token].logprob for place, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    sys.stdout.write("\n" + json.dumps({"tokens": list(answer.token_ids), "log_probs": log_probs}) + "\n")


if __name__ == "__main__":
    main()
