"""What PyPI's verl imports in each of its processes, through the entry-point group `verl.plugins`."""

from .registration import register, say

try:
    register()
except Exception as exc:
    say(exc)
    raise
