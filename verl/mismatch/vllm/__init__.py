"""vLLM's side of `mismatch`. Only what is in here imports vLLM."""
