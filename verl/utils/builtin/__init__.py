"""Models and data that the project makes itself, so that it runs without downloads.

`builtin:arithmetic` and `builtin:shapes` (data), `builtin:tiny-qwen2`, `builtin:tiny-qwen3-moe` and, for shapes,
`builtin:tiny-qwen2.5-vl` (models) are made on first use and kept in `verl.envs.cache_dir()`.
"""

from __future__ import annotations

import logging
from pathlib import Path

from verl.utils.builtin.arithmetic import SPLITS, ArithmeticRecipe, make_arithmetic
from verl.utils.builtin.cache import cached_directory
from verl.utils.builtin.shapes import ShapesRecipe, make_shapes
from verl.utils.builtin.tiny import ARCHITECTURES, make_tiny_model
from verl.utils.builtin.warm_sight import TinyQwen25VLRecipe, make_warm_seeing_model
from verl.utils.builtin.warmup import RECIPES, make_warm_model
from verl.utils.config import ConfigError, did_you_mean

__all__ = [
    "ARCHITECTURES",
    "PREFIX",
    "UnknownBuiltin",
    "builtin_data",
    "builtin_model",
    "is_builtin",
    "make_tiny_model",
]

PREFIX = "builtin:"
LEARNING_RATE = 2e-4
"""Of built-in models, which are small and have just had a warm-up."""
LORA_LEARNING_RATE = 2e-3
"""Of adapters of such a model, which start at zero."""
CRITIC_LEARNING_RATE = 1e-3
"""Of a critic that starts as that model, with a value head of zeros."""
TRAINING_STEPS = 30
"""Enough on `builtin:arithmetic` for the held-out reward to level off."""
DATA = ("arithmetic", "shapes")
SHAPES, SEEING_MODEL = "builtin:shapes", "builtin:tiny-qwen2.5-vl"
"""Data with pictures, and the model for them."""

logger = logging.getLogger(__name__)


class UnknownBuiltin(ConfigError):
    """The project has no built-in model or data set of this name."""


def is_builtin(name: str) -> bool:
    """Whether `name` has the form of a built-in name, known or not."""
    return name.startswith(PREFIX)


def builtin_data(name: str, split: str) -> Path:
    """The parquet file of a data set of DATA for the split `train` or `test`. Raises ConfigError for another name."""
    _known(name, DATA, "data set")
    if split not in SPLITS:
        raise ConfigError(f"{name} has the splits {', '.join(SPLITS)}, not {split!r}")
    if name == SHAPES:
        shapes = ShapesRecipe()
        made = cached_directory("shapes", shapes, lambda directory: make_shapes(directory, shapes))
    else:
        recipe = ArithmeticRecipe()
        made = cached_directory("arithmetic", recipe, lambda directory: make_arithmetic(directory, recipe))
    return made / f"{split}.parquet"


def builtin_model(name: str) -> Path:
    """The Hugging Face directory of a model of RECIPES, or of SEEING_MODEL. Raises ConfigError for another name."""
    _known(name, (*RECIPES, SEEING_MODEL.removeprefix(PREFIX)), "model")
    if name == SEEING_MODEL:
        return _seeing_model()
    recipe = RECIPES[name.removeprefix(PREFIX)]

    def build(directory: Path) -> None:
        logger.info("making %s (once, about half a minute) ...", name)
        make_warm_model(directory, recipe)
        logger.info("made %s", name)

    return cached_directory(name.removeprefix(PREFIX), recipe, build)


def _seeing_model() -> Path:
    recipe = TinyQwen25VLRecipe()

    def build(directory: Path) -> None:
        logger.info("making %s (once, about a minute) ...", SEEING_MODEL)
        make_warm_seeing_model(directory, recipe)
        logger.info("made %s", SEEING_MODEL)

    return cached_directory(SEEING_MODEL.removeprefix(PREFIX), recipe, build)


def _known(name: str, names: tuple[str, ...], kind: str) -> None:
    known = [PREFIX + each for each in names]
    if name not in known:
        raise UnknownBuiltin(f"there is no built-in {kind} {name!r}.{did_you_mean(name, known)}")
