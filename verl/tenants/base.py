"""The base model with its adapters, which peft adds, switches and removes; one is active at a time.

All of this belongs to one thread: an adapter that is switched while another computes would serve a wrong one.
"""

from __future__ import annotations

import itertools
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from verl.checkpoint_engine.errors import BackendUnavailable
from verl.utils.config import ConfigError
from verl.utils.model import read_hf_config, resolve_model_path
from verl.utils.model_files import require_embeddings
from verl.workers.hf.fit import require_whole_model

ATTENTION, MLP = re.compile(r"(^|\.)\w*att(n|ention)\w*\."), re.compile(r"(^|\.)\w*(mlp|feed_forward|ffn)\w*\.")
PREFIX = "base_model.model."
"""What peft's files have before the names of a model's layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Which layers an adapter is beside, and how large it is. Its scale is alpha / rank."""

    rank: int
    alpha: int
    attention: bool = True
    mlp: bool = True
    unembedding: bool = True

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def whole_model(path: Path) -> Path:
    """The directory, resolved, of a model whose files are complete, with its tokenizer. Raises ConfigError."""
    key = "--model"
    directory = resolve_model_path(path, key=key).resolve()
    require_whole_model(directory, key, lambda: read_hf_config(directory, trust_remote_code=False), remote=False)
    return directory


class Base:
    """A causal language model of a directory, on the processor."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """Raises ConfigError for a model whose layers adapters cannot be beside, BackendUnavailable without peft."""
        try:
            import peft  # noqa: F401
            from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
            from transformers.utils import logging as transformers_logging
        except ImportError as exc:
            raise BackendUnavailable(f"serve needs the package 'peft': pip install 'verl-sync[lora]' ({exc})") from exc
        self.directory = directory
        try:
            transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
            self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError, KeyError) as exc:
            raise ConfigError(f"--model {directory}: {' '.join(str(exc).split())}") from exc
        require_embeddings(self.tokenizer, self.model.config, f"--model {directory}")
        self.model.train(False).requires_grad_(False)
        ends: Any = self.model.generation_config.eos_token_id
        self.ends: list[int] = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        no_defaults: Any = GenerationConfig
        self.model.generation_config = no_defaults()  # what its authors sample with is not what a client asks for
        embeddings: Any = self.model.get_input_embeddings()
        self.vocabulary: int = embeddings.num_embeddings
        self.context: int = getattr(self.model.config, "max_position_embeddings", None) or 2**31
        self.layers = self._kinds()
        """The names of the linear layers, by the fields of `Shape`."""
        self._numbers = itertools.count()
        self._adapters: set[str] = set()

    def _kinds(self) -> dict[str, list[str]]:
        """The linear layers by what they belong to."""
        kinds: dict[str, list[str]] = {"attention": [], "mlp": [], "unembedding": []}
        output = self.model.get_output_embeddings()
        other = [name for name, parameter in self.model.named_parameters() if parameter.ndim > 2]
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Linear):
                if module is output:
                    kinds["unembedding"].append(name)
                elif ATTENTION.search(name):
                    kinds["attention"].append(name)
                elif MLP.search(name):
                    kinds["mlp"].append(name)
                else:
                    other.append(name)
        if other or not all(kinds.values()):
            what = f"{other[0]} is none of them" if other else f"it has {[kind for kind in kinds if kinds[kind]]}"
            raise ConfigError(
                f"--model {self.directory}: {type(self.model).__name__} is not served: adapters are for linear layers"
                f" of attention, MLP and unembedding, and {what}. Dense text models such as Qwen3 and Llama are served."
            )
        return kinds

    def add(self, shape: Shape, seed: int) -> str:
        """Add an adapter as peft initialises it after `torch.manual_seed(seed)`; returns its name."""
        from peft import LoraConfig

        targets = [name for kind, names in self.layers.items() if getattr(shape, kind) for name in names]
        config = LoraConfig(
            r=shape.rank,
            lora_alpha=shape.alpha,
            lora_dropout=0.0,
            target_modules=targets,
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(self.directory),
        )
        # All names have one length: peft finds an adapter's tensors by a part of their names.
        name = f"adapter{next(self._numbers):09}"
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")  # of a tied unembedding: only its use as an output is adapted
            torch.manual_seed(seed)
            self.model.add_adapter(config, adapter_name=name)
        self._adapters.add(name)
        for parameter in self.parameters(name).values():
            parameter.data = parameter.data.float()  # as peft has it: steps of Adam are lost in a bfloat16
        return name

    def remove(self, name: str) -> None:
        self._adapters.discard(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of another one that is active then: each call says which one it uses
            self.model.delete_adapter(name)

    @contextmanager
    def using(self, name: str | None) -> Iterator[nn.Module]:
        """The model with this adapter alone, or with none."""
        if name is not None:
            self.model.set_adapter(name)
            yield self.model
        elif not self._adapters:
            yield self.model
        else:
            self.model.disable_adapters()
            try:
                yield self.model
            finally:
                self.model.enable_adapters()

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Those of an adapter, in the model's order, under the names of peft's files."""
        return {
            PREFIX + key.replace(f".{name}", ""): parameter
            for key, parameter in self.model.named_parameters()
            if f".{name}." in key
        }

    @torch.no_grad()
    def fill(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set an adapter's tensors. They are those of its shape: see `checkpoints`."""
        parameters = self.parameters(name)
        assert parameters.keys() == tensors.keys()
        for key, parameter in parameters.items():
            parameter.copy_(tensors[key])

    def config(self, name: str) -> bytes:
        """Peft's adapter_config.json."""
        with tempfile.TemporaryDirectory() as directory:
            self.model.peft_config[name].save_pretrained(directory)
            return (Path(directory) / "adapter_config.json").read_bytes()

    def logprobs(self, model: nn.Module, tokens: np.ndarray, targets: np.ndarray) -> torch.Tensor:
        """float32 [n]: of target i after tokens up to i."""
        logits = model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0]
        scores: torch.Tensor = logits.float().log_softmax(-1)
        return scores.gather(1, torch.from_numpy(targets.copy())[:, None])[:, 0]
