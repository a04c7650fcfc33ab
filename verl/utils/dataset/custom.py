"""The data set of a split: `RLHFDataset`, or a user's class."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from verl.utils.config import ConfigError
from verl.utils.dataset.rl_dataset import RLHFDataset, ShownTools
from verl.utils.dataset.schema import RowError, sample
from verl.utils.dataset.settings import DataSettings
from verl.utils.pictures import PictureProcessor
from verl.utils.user_code import load_from_file

if TYPE_CHECKING:
    from collections.abc import Sized

    from transformers import PreTrainedTokenizerBase

VERLS = ("data_files", "tokenizer", "config", "processor", "max_samples")
"""The arguments that verl passes, by name."""
UNHEARD = {
    "on_batch_end": "samples do not change while a job runs",
    "_download": "data files are local",
    **dict.fromkeys(
        ("process_vision_info", "process_multi_modal_info", "_process_multi_modal_info", "_extract_audio_info"),
        "prompts are text",
    ),
}
"""Methods that verl calls and this project does not, with the reason."""


def build_dataset(
    files: Sequence[Path],
    tokenizer: PreTrainedTokenizerBase,
    config: DataSettings,
    split: str = "train",
    *,
    shown_tools: ShownTools | None = None,
    processor: PictureProcessor | None = None,
) -> torch.utils.data.Dataset[dict[str, Any]]:
    """Make `RLHFDataset`, or the class that `data.custom_cls` names. It gets those of these arguments that it declares:
    verl's (`VERLS`), `split` ("train" or "val"), `is_train`, `shown_tools`, `files` (a list of paths).

    Raises ConfigError for a class that requires others, that is no data set, that has a method of `UNHEARD`, or whose
    first item is no sample.
    """
    if config.custom_cls.path is None:
        if config.custom_cls.name is not None:
            raise ConfigError(f"data.custom_cls.name={config.custom_cls.name} is set: set data.custom_cls.path, too")
        return RLHFDataset(files, tokenizer, config, processor, split=split, shown_tools=shown_tools)
    if config.custom_cls.name is None:
        raise ConfigError("data.custom_cls.path is set: set data.custom_cls.name to the class in it")
    cls = load_from_file(config.custom_cls.path, config.custom_cls.name, key="data.custom_cls")
    name = f"data.custom_cls.name={config.custom_cls.name!r}"
    if not (isinstance(cls, type) and issubclass(cls, torch.utils.data.Dataset)):
        raise ConfigError(f"{name} is no subclass of torch.utils.data.Dataset")
    for method, why in UNHEARD.items():
        if hasattr(cls, method):
            raise ConfigError(f"{name} has a method {method}, which is not called here: {why}")
    limit = config.train_max_samples if split == "train" else config.val_max_samples
    arguments = _taken(
        cls,
        name,
        {
            "data_files": [str(path) for path in files],
            "tokenizer": tokenizer,
            "config": config,
            "processor": processor,
            "max_samples": limit,
            "files": list(files),
            "split": split,
            "is_train": split == "train",
            "shown_tools": shown_tools,
        },
    )
    dataset: Any = cls.__new__(cls)
    if issubclass(cls, RLHFDataset):  # a constructor like verl's has no words for them
        dataset.read_for(split, shown_tools)
    dataset.__init__(**arguments)
    if not isinstance(dataset, RLHFDataset):
        if 0 <= limit < len(dataset):
            raise ConfigError(
                f"{name} has {len(dataset)} samples of {split}, data.{split}_max_samples is {limit}: "
                "its argument max_samples says how many it may have"
            )
        _check_first_item(dataset, config, split)
    return cast("torch.utils.data.Dataset[dict[str, Any]]", dataset)


def _taken(cls: type, name: str, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `offered` that the constructor has names for; of verl's, all, if it takes any name."""
    parameters = inspect.signature(cls).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    taken = {each: value for each, value in offered.items() if each in parameters}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        taken |= {each: offered[each] for each in VERLS if each != "data_files" or "files" not in parameters}
        if "files" in parameters:
            taken["split"] = offered["split"]
    wanted = [
        each
        for each, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and each not in taken
    ]
    if wanted:
        raise ConfigError(
            f"{name}: its constructor requires {', '.join(wanted)}, which it is not given. Known: {', '.join(offered)}"
        )
    return taken


def _check_first_item(dataset: torch.utils.data.Dataset[dict[str, Any]], config: DataSettings, split: str) -> None:
    """Of a class that does not check its rows itself; to make all its items may take long."""
    if not len(cast("Sized", dataset)):
        raise ConfigError(f"data.custom_cls.name={config.custom_cls.name!r} has no {split} samples")
    item = dataset[0]
    try:
        sample({**item, config.prompt_key: item.get("raw_prompt")}, config)
    except RowError as exc:
        raise ConfigError(f"data.custom_cls.name={config.custom_cls.name!r}: item 0 of {split}: {exc}") from exc
