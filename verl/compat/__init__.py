"""Private names of other packages, in one file for each library. An upgrade begins here.

Those of torch and vLLM are in `verl/checkpoint_engine/compat/`, which has to stand alone. Each function says what it
stands for, why no public name does it, and, where there is one, the change upstream after which it goes.
`tests/test_private_names.py` finds such names anywhere else.
"""
