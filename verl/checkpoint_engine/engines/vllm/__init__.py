"""What runs inside vLLM's processes: loading a version from an arena, and looking whether it is computed with."""
