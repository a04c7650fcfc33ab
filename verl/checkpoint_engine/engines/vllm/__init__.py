"""Code that runs in vLLM's processes: loading a version, and checking that the worker computes with it."""
