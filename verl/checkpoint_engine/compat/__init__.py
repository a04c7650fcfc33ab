"""All private names of torch, vLLM and SGLang that the checkpoint engine uses, and some that the project uses.

Each function states its purpose, why no public name serves it, and the upstream change, if any, that makes it
unnecessary. `tests/test_private_names.py` fails for private names anywhere else.
"""
