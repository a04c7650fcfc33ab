"""Prompts: read from files, tokenized, and loaded in batches from a checkpoint's position on."""

from verl.utils.dataset.custom import build_dataset
from verl.utils.dataset.dataloader import PromptLoader, build_dataloader, collate_fn, fingerprint
from verl.utils.dataset.files import resolve_data_files
from verl.utils.dataset.rl_dataset import RLHFDataset

__all__ = [
    "PromptLoader",
    "RLHFDataset",
    "build_dataloader",
    "build_dataset",
    "collate_fn",
    "fingerprint",
    "resolve_data_files",
]
