"""What is said about faults in a real engine: one for all of them.

    python -m tests.mismatch.seeded_process ENGINE MODEL DTYPE FAULT ...

Prints a line of JSON for each fault that the model can have: its name, and the names, places and texts of the causes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from verl.mismatch.command import Settings, look, started
from verl.mismatch.recording import Sampling

EXACT = "exact"
"""In the place of a dtype: bfloat16, and the engine has the trainer's modules."""
SAMPLED = {
    "temperature_twice": (Sampling(temperature=0.7), Sampling(temperature=0.7)),
    "top_p": (Sampling(top_p=0.9), Sampling()),
    "top_k": (Sampling(top_k=5), Sampling()),
    "penalty": (Sampling(repetition_penalty=1.3), Sampling()),
    "temperature_of_one": (Sampling(temperature=0.7), Sampling()),
}
"""How the engine samples, and what the trainer takes that to be."""


FAULTY = {
    "vllm": "tests.mismatch.seeded_vllm.FaultyVLLM",
    "sglang": "tests.mismatch.seeded_sglang.FaultySGLang",
}
"""Classes by engine, which its processes import."""


def main() -> None:
    engine, model, dtype, *faults = sys.argv[1:]
    exact = dtype == EXACT
    settings = Settings(model=Path(model), engine=engine, dtype="bfloat16" if exact else dtype, exact=exact)
    began = time.perf_counter()
    with started(settings, FAULTY[engine]) as sides:
        print(json.dumps({"started_s": time.perf_counter() - began}), flush=True)
        for fault in faults:
            of_engine, trainer = SAMPLED.get(fault, (Sampling(), Sampling()))
            seeded = "nothing" if fault in SAMPLED and fault != "temperature_twice" else fault
            if not sides.engine.call("inject", seeded)[0]:
                continue
            began = time.perf_counter()
            try:
                found = look(sides, settings, engine_sampling=of_engine, sampling=trainer)
            finally:
                sides.engine.call("undo")
            told = [[cause.name, cause.place, cause.text] for cause in found.causes]
            worst = max((max(place.excess.values(), default=0.0) for place in found.places), default=0.0)
            line = {
                "fault": fault,
                "causes": told,
                "worst": worst,
                "mean": found.mean,
                "s": time.perf_counter() - began,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
