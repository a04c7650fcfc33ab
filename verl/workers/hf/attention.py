"""Choose an implementation of attention that computes a model correctly."""

from __future__ import annotations

from importlib.util import find_spec

from transformers import PretrainedConfig

from verl.utils.config import ConfigError
from verl.utils.model import EXACT

KEY = "actor_rollout_ref.model.override_config.attn_implementation"
IMPLEMENTATIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention", EXACT)

PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""The packages of implementations. transformers can use `kernels` instead of either."""


def require_attention(asked: str | None, device: str) -> None:
    """Raises ConfigError for an implementation that has no package, or no backward pass on `device`. On the driver."""
    package = PACKAGES.get(str(asked))
    if device == "cpu" and (package or asked == "flex_attention"):
        why = "is not trained on CPUs"
    elif device == "cuda" and package and not (find_spec(package) or find_spec("kernels")):
        why = f"needs the package {package!r}, which is not installed"
    else:
        return
    raise ConfigError(f"{KEY}={asked} {why}: leave the key out for torch's own fused attention (sdpa)")


def attention_implementation(config: PretrainedConfig, asked: str | None = None) -> str | None:
    """The implementation to request of transformers: `asked`, or None for its default, torch's `sdpa`.

    That leaves out attention sinks, soft-capped scores and the scale of ALiBi biases. transformers knows the models
    with sinks, and computes or refuses them itself; scores that a config caps or biases are computed by `eager`.

    Raises ConfigError for an implementation that is unknown or would compute something else.
    """
    if asked is not None and asked not in IMPLEMENTATIONS:
        raise ConfigError(f"{KEY}={asked}: unknown; there are {', '.join(IMPLEMENTATIONS)}")
    text = config.get_text_config().to_dict()
    caps = [
        f"{name}={value}"
        for name, value in text.items()
        if value and "attn" in name and ("softcap" in name or "logit_cap" in name)
    ]
    biases = [f"{name}={value}" for name, value in text.items() if value and name == "alibi"]
    changed = biases or (caps if asked in (None, "sdpa") else [])
    if asked not in (None, "eager") and changed:
        raise ConfigError(
            f"{KEY}={asked} does not compute scores as the model's config says ({changed[0]}); leave the key out, or "
            "set eager"
        )
    return asked or ("eager" if changed else None)
