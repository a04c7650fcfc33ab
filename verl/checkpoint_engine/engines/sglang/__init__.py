"""Code that runs in SGLang's ranks: loading a version, and checking that it fits."""
