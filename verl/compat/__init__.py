"""Private names of other packages, in one file per library. Check them first at an upgrade.

Those of torch and vLLM are in `verl/checkpoint_engine/compat/`, which has to stand alone. Each function states its
purpose, why no public name serves it, and the upstream change, if any, that makes it unnecessary.
`tests/test_private_names.py` finds such names anywhere else.
"""
