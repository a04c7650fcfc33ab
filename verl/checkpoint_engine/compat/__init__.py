"""Private names of torch and vLLM: all that the checkpoint engine uses, and what others of the project use of them.

Each function says what it stands for, why no public name does it, and, where there is one, the change upstream after
which it goes. `tests/test_private_names.py` finds such names anywhere else.
"""
