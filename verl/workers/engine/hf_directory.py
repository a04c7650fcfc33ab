"""Writing a Hugging Face model directory, whatever the tensors come from."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoTokenizer

from verl.utils.files import sync_to_disk
from verl.workers.config import HFModelConfig
from verl.workers.engine.fsdp.hf_checkpoint import INDEX_FILE, SINGLE_FILE

FILE_NBYTES = 5 * 10**9


def write_hf_directory(
    directory: Path,
    nbytes: Mapping[str, int],
    collect: Callable[[str], Mapping[str, torch.Tensor]],
    *,
    hf_config: Any,
    generation_config: Any,
    model_config: HFModelConfig,
    dtype: torch.dtype,
    file_nbytes: int = FILE_NBYTES,
) -> None:
    """Write config, tokenizer and safetensors files that transformers and vLLM load.

    `collect` is a collective that is called once for every name of `nbytes`, in order, so rank 0 holds no more than one
    file of about `file_nbytes`. It gives, on rank 0, whole CPU tensors under the names that they have in the file; what
    it gives elsewhere does not matter. A collective; everything is synced to disk when it returns.
    """
    groups = list(_files(nbytes, file_nbytes))
    is_writer = dist.get_rank() == 0
    if is_writer:
        directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(groups, start=1):
        file = SINGLE_FILE if len(groups) == 1 else f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        content = {own: full for name in names for own, full in collect(name).items()}
        if is_writer:
            weight_map |= dict.fromkeys(content, file)
            save_file(content, directory / file, metadata={"format": "pt"})
    if is_writer:
        if len(groups) > 1:
            index_text = json.dumps(
                {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": weight_map}, indent=2
            )
            (directory / INDEX_FILE).write_text(index_text)
        _write_config(directory, hf_config, generation_config, model_config, dtype)
        sync_to_disk(directory)
    dist.barrier()


def _files(nbytes: Mapping[str, int], file_nbytes: int) -> Iterator[list[str]]:
    """Names in runs of at most `file_nbytes`, or one tensor if that is larger."""
    names: list[str] = []
    size = 0
    for name, own in nbytes.items():
        if names and size + own > file_nbytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += own
    yield names


def _write_config(
    directory: Path, hf_config: Any, generation_config: Any, model_config: HFModelConfig, dtype: torch.dtype
) -> None:
    config = copy.deepcopy(hf_config)
    config.dtype = dtype
    config.save_pretrained(directory)
    if generation_config is not None:
        generation_config.save_pretrained(directory)
    tokenizer_path = Path(model_config.tokenizer_path or model_config.path)
    if (tokenizer_path / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=model_config.trust_remote_code)
        if model_config.custom_chat_template:
            tokenizer.chat_template = model_config.custom_chat_template
        tokenizer.save_pretrained(directory)
