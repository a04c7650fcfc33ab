"""Python's own library."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    PlainUnpickler = pickle.Unpickler
else:
    PlainUnpickler: Any = pickle._Unpickler
    """`pickle.Unpickler`, the one that is written in Python: that in C takes as much memory as a number in a file says.
    It has no other name."""
