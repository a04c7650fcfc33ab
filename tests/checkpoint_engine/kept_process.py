"""vLLM models that are told what they compute with, and get versions of which a part is the same.

    python -m tests.checkpoint_engine.kept_process DIRECTORY MODEL ...

No engine. Prints JSON: records of activations (see `Activated`), and what is said of heads (see `heads`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FLOAT8 = "float8"
"""Name of the directory of a model whose weights are quantized as they are loaded."""
REFRESHING = "RefreshingLlamaForCausalLM"
STEPS: dict[str, tuple[int | None, Callable[[str], bool]]] = {
    "first": (None, lambda name: True),
    "a projection and a norm": (
        1,
        lambda name: name.endswith(("layers.0.self_attn.q_proj.weight", "layers.0.input_layernorm.weight")),
    ),
    "one layer": (2, lambda name: ".layers.1." in name),
    "nothing": (3, lambda name: False),
    "everything": (4, lambda name: True),
    "one layer, after another version": (4, lambda name: ".layers.1." in name),
    "one layer, of an unknown version": (None, lambda name: ".layers.1." in name),
    "one layer again": (7, lambda name: ".layers.1." in name),
}
"""The version that the caller takes the engine to have, and the tensors that change. Versions count from 1."""


@dataclass
class Activated:
    model: str
    step: str
    kept: int
    tensors: int
    wrong: dict[str, str]
    """Tensors that the model computes with, other than one loaded from disk does."""
    wrapped: int
    """Loaders that something of a reload is still around, of parameters and of what the next reload begins with."""


def main() -> None:
    import torch

    from tests.checkpoint_engine.check_process import PLAIN, QUANTIZED, make_config
    from tests.models.vllm_process import _distributed, _model

    torch.accelerator.empty_cache = lambda: None
    register_refreshing()
    told, of_heads = list[Activated](), dict[str, Any]()
    for directory in map(Path, sys.argv[2:]):
        names = (None, REFRESHING) if directory.name == "llama" else (None,)
        for name in names:
            options = QUANTIZED if directory.name == FLOAT8 else PLAIN
            config = make_config(directory, {"architectures": [name]} if name else {}, options)
            with _distributed(config):
                told += steps(name or directory.name, config, _model(config), directory, Path(sys.argv[1]))
        if directory.name == "tied":
            config = make_config(directory, {}, PLAIN)
            with _distributed(config):
                of_heads = heads(config, _model(config), directory, Path(sys.argv[1]))
    sys.stdout.write("\n" + json.dumps([[asdict(one) for one in told], of_heads]))


def register_refreshing() -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    class RefreshingLlamaForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
        """Makes something of its norm at the end of loading, when a layer that is kept has no memory."""

        def load_weights(self, weights: Any) -> set[str]:
            loaded: set[str] = super().load_weights(weights)
            self.model.packed = self.model.norm.weight.detach().clone()
            return loaded

    ModelRegistry.register_model(REFRESHING, RefreshingLlamaForCausalLM)


def steps(model_name: str, config: Any, model: Any, directory: Path, shm_dir: Path) -> list[Activated]:
    from tests.models.vllm_process import _engine, file_weights
    from verl.checkpoint_engine.engines.vllm.build import load_as_from_disk
    from verl.checkpoint_engine.engines.vllm.live import differences, live_tensors
    from verl.checkpoint_engine.engines.vllm.receiver import ArenaUpdateInfo
    from verl.checkpoint_engine.memory.arena import NodeArena

    engine = _engine(config, model)
    tensors = dict(file_weights(directory))
    plan = plan_of(tensors)
    told = []
    with NodeArena.create(shm_dir=shm_dir, job="kept", node=model_name, layout=plan.layout, slots=2) as arena:
        for version, (step, (since, changes)) in enumerate(STEPS.items(), start=1):
            if version > 1:
                tensors = {name: tensor + changes(name) for name, tensor in tensors.items()}
            commit(arena, plan, version, tensors)
            engine.receive_weights(ArenaUpdateInfo(arena_path=str(arena.directory), version=version, since=since))
            found, expected = live_tensors(model), live_tensors(load_as_from_disk(config, tensors.items()))
            wrong = differences({name: found[name] for name in found.keys() & expected.keys()}, expected)
            checked = engine.checked
            kept = checked.tensors_kept if checked else 0
            told.append(Activated(model_name, step, kept, len(tensors), wrong, wrapped_loaders(model)))
    return told


def heads(config: Any, model: Any, directory: Path, shm_dir: Path) -> dict[str, Any]:
    """What a model that is tied says of versions with a head, and how many of its tensors are then not those of the
    last one that it took, or None where that does not matter."""
    from tests.models.vllm_process import _engine, file_weights
    from verl.checkpoint_engine.engines.vllm.build import load_as_from_disk
    from verl.checkpoint_engine.engines.vllm.live import differences, live_tensors
    from verl.checkpoint_engine.engines.vllm.receiver import ArenaUpdateInfo
    from verl.checkpoint_engine.errors import ActivationError
    from verl.checkpoint_engine.memory.arena import NodeArena

    engine, tensors, told = _engine(config, model), dict(file_weights(directory)), dict[str, Any]()
    embedding = tensors["model.embed_tokens.weight"]
    versions = {
        "equal": tensors | {"lm_head.weight": embedding.clone()},
        "other": {name: tensor * 2 for name, tensor in tensors.items()} | {"lm_head.weight": embedding * 3},
    }
    layout = plan_of(versions["equal"])
    with NodeArena.create(shm_dir=shm_dir, job="heads", node="tied", layout=layout.layout, slots=2) as arena:
        for version, (case, sent) in enumerate(versions.items(), start=1):
            commit(arena, layout, version, sent)
            said = None
            try:
                engine.receive_weights(ArenaUpdateInfo(arena_path=str(arena.directory), version=version))
            except ActivationError as exc:
                said = exc.message
            wrong = differences(live_tensors(model), live_tensors(load_as_from_disk(config, tensors.items())))
            told[case] = said, len(wrong)
    without = {name: tensor for name, tensor in versions["equal"].items() if name != "lm_head.weight"}
    as_servers_hand_over = {
        "equal, once": versions["equal"],
        "other, once": versions["other"],
        "none, once": without,
        "new, once": versions["equal"],
        "new, once more": versions["equal"],
    }
    for case, sent in as_servers_hand_over.items():
        said = None
        try:
            engine.load_once(iter(sent.items()))
        except ActivationError as exc:
            said = exc.message
        told[case] = said, None
    return told


def wrapped_loaders(model: Any) -> int:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    from verl.checkpoint_engine.engines.vllm.reload import NOTING

    next_ones = [
        tensor for layer in model.modules() for tensor in get_layerwise_info(layer).restore_metadata[0].values()
    ]
    loaders = [getattr(tensor, "weight_loader", None) for tensor in (*model.parameters(), *next_ones)]
    return sum(hasattr(loader, NOTING) for loader in loaders)


def plan_of(tensors: Any) -> Any:
    from verl.checkpoint_engine.plan.layout import Layout
    from verl.checkpoint_engine.plan.shards import ShardTable
    from verl.checkpoint_engine.plan.sync_plan import make_plan
    from verl.checkpoint_engine.plan.types import Box, Shard, TensorSpec

    specs = [
        TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    ]
    layout = Layout.of(specs)
    shards = [Shard(spec.name, Box((0,) * len(spec.shape), spec.shape)) for spec in specs]
    return make_plan(layout, [ShardTable.of(layout, shards)], block_nbytes=4096)


def commit(arena: Any, plan: Any, version: int, tensors: Any) -> None:
    from verl.checkpoint_engine.memory.digest import Manifest, digest_pieces

    arena.begin(version)
    slot = arena.writable_view()
    for spec in plan.layout.specs:
        slot.tensor(spec).copy_(tensors[spec.name])
    arena.commit(version, Manifest(version, plan, digest_pieces(slot.bytes.numpy(), plan.extents)))


if __name__ == "__main__":
    main()
