"""Fixtures that several packages of tests share."""

import logging
import os
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ray_cluster():
    """A Ray of this test session alone. CPUs are logical: 16, however many the machine has."""
    import ray

    tests = str(Path(__file__).parent)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
        # Ray's processes inherit these; they import the worker classes that test modules define.
        environment.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path.startswith(tests)))
        ray.init(
            address="local",
            num_cpus=16,
            object_store_memory=2**30,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        yield
        ray.shutdown()
