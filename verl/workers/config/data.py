"""The `data` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.utils.config import Section, option, section


@dataclass(frozen=True, kw_only=True)
class CustomClassConfig(Section):
    """A class of the user's own, loaded from a file."""

    path: str | None = option(None, "Python file that defines the class; null: the built-in one")
    name: str | None = option(None, "class name in that file")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Prompts: where they are and how they become token ids."""

    train_files: str | list[str] = option(
        "builtin:arithmetic",
        "parquet or JSON Lines file, or list of them; builtin:arithmetic and builtin:shapes are made on first use",
    )
    val_files: str | list[str] = option(
        "builtin:arithmetic",
        "parquet or JSON Lines file, or list of them, with held-out problems; null: those of built-in train_files; "
        "others need them",
        follows=True,
    )
    prompt_key: str = option("prompt", "column with the chat messages")
    reward_fn_key: str = option("data_source", "column that selects the reward function")
    image_key: str = option(
        "images", "column of pictures; refused where it is not empty and the model reads text alone"
    )
    video_key: str = option("videos", "column of videos; refused where it is not empty and the model sees none")
    audio_key: str = option("audios", "column of sounds; refused where it is not empty")
    train_batch_size: int = option(
        64,
        "prompts per training step; fully_async_main takes 0, too; null: 64 with a built-in model and built-in data, "
        "else verl's 1024",
        least=0,
        follows=True,
    )
    gen_batch_size: int | None = option(
        None,
        "prompts generated at a time: train_batch_size, or any number with algorithm.filter_groups, or 1 in "
        "fully_async_main; null: that",
        least=1,
    )
    val_batch_size: int | None = option(None, "prompts per validation batch; null: all at once", least=1)
    max_prompt_length: int = option(
        64,
        "tokens; prompts are padded on the left to this length; null: 64 with a built-in model and built-in data, else "
        "verl's 512",
        least=1,
        follows=True,
    )
    max_response_length: int = option(
        16,
        "tokens; responses are padded on the right to this length; null: 16 with a built-in model and built-in data, "
        "else verl's 512",
        least=1,
        follows=True,
    )
    train_max_samples: int = option(
        -1,
        "use only this many training samples: drawn by data.seed, or with shuffle=false the first; -1: all",
        least=-1,
    )
    val_max_samples: int = option(-1, "use only this many validation samples, chosen likewise; -1: all", least=-1)
    shuffle: bool = option(True, "shuffle the training samples every epoch")
    seed: int = option(1, "seed of the shuffle", least=0, below=2**32)
    filter_overlong_prompts: bool = option(False, "drop prompts longer than max_prompt_length, and say how many")
    truncation: str = option(
        "error", "what to do with a prompt longer than max_prompt_length", choices=("error", "left", "right", "middle")
    )
    apply_chat_template_kwargs: dict[str, Any] = option({}, "passed to tokenizer.apply_chat_template")
    mm_processor_kwargs: dict[str, Any] = option(
        {},
        "min_pixels and max_pixels, to which pictures and videos are scaled, fps or num_frames of videos, and "
        "videos_kwargs of both for videos alone; without, those of the model's processor",
    )
    custom_cls: CustomClassConfig = section(CustomClassConfig, "a Dataset class of your own")
    return_raw_chat: bool = option(True, "keep the chat messages next to the token ids (agent loops need them)")
    resume_other_data: str = option(
        "error",
        "a checkpoint whose samples, order or files were others: refuse, or begin a new epoch with these",
        choices=("error", "new_epoch"),
    )
    dataloader_num_workers: int = option(0, "worker processes of the data loader (verl: 8)", least=0)
