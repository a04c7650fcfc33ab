"""Which implementation of attention computes what a model defines."""

from __future__ import annotations

from transformers import PretrainedConfig

from verl.utils.config import ConfigError

KEY = "actor_rollout_ref.model.override_config.attn_implementation"
IMPLEMENTATIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")


def attention_implementation(config: PretrainedConfig, asked: str | None = None) -> str | None:
    """What to ask transformers for: `asked`, or None for its own choice, which is torch's fused attention (`sdpa`).

    That leaves out attention sinks and soft-capped scores. transformers knows the models with sinks, and computes or
    refuses them itself; scores that a config caps are computed by `eager`.

    Raises ConfigError for an implementation that is unknown or would compute something else.
    """
    if asked is not None and asked not in IMPLEMENTATIONS:
        raise ConfigError(f"{KEY}={asked}: unknown; there are {', '.join(IMPLEMENTATIONS)}")
    caps = [
        f"{name}={value}"
        for name, value in config.get_text_config().to_dict().items()
        if value and "attn" in name and ("softcap" in name or "logit_cap" in name)
    ]
    if asked == "sdpa" and caps:
        raise ConfigError(
            f"{KEY}=sdpa leaves out the soft-capping of scores that the model's config asks for ({caps[0]}); leave the "
            "key out, or set eager"
        )
    return asked or ("eager" if caps else None)
