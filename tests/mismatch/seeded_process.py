"""What is said about faults in a real vLLM: one engine for all of them.

    python -m tests.mismatch.seeded_process MODEL DTYPE FAULT ...

Prints a line of JSON for each fault that the model can have: its name, and the names, places and texts of the causes.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tests.mismatch.seeded import Faulty
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


def main() -> None:
    exact = sys.argv[2] == EXACT
    settings = Settings(model=Path(sys.argv[1]), dtype="bfloat16" if exact else sys.argv[2], exact=exact)
    began = time.perf_counter()
    with started(settings, extension=Faulty) as sides:
        print(json.dumps({"started_s": time.perf_counter() - began}), flush=True)
        for fault in sys.argv[3:]:
            engine, trainer = SAMPLED.get(fault, (Sampling(), Sampling()))
            seeded = fault if hasattr(Faulty, f"_{fault}") else "nothing"
            if not sides.engine.call("inject", seeded)[0]:
                continue
            began = time.perf_counter()
            try:
                found = look(sides, settings, engine_sampling=engine, sampling=trainer)
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
