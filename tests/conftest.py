"""Fixtures that several packages of tests share."""

import logging

import pytest


@pytest.fixture(scope="session")
def ray_cluster():
    """A Ray of this test session alone. CPUs are logical: 16, however many the machine has."""
    import ray

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")
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
