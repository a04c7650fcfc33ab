"""Whether this machine's vLLM multiplies matrices of float8."""

from __future__ import annotations

from pathlib import Path

import pytest

FLOAT8_ON_CPU = "amx_tile" in Path("/proc/cpuinfo").read_text()
NEEDS_FLOAT8 = pytest.mark.skipif(not FLOAT8_ON_CPU, reason="vLLM multiplies float8 on CPUs that have AMX")
