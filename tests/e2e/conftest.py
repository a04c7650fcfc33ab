"""Whole runs. They take seconds each, mostly for starting processes, so one run proves several things."""

import pytest

from tests.e2e.job import QUICK, Job
from verl.utils.builtin import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def start(tmp_path, tiny_model):
    """Starts a quick run: transformers as the engine, a tiny random model. What it leaves behind is ended."""
    jobs = []

    def start_job(*overrides, name="job", **options):
        model = f"actor_rollout_ref.model.path={tiny_model}"
        jobs.append(Job(tmp_path / name, *QUICK, model, *overrides, **options))
        return jobs[-1]

    yield start_job
    for job in jobs:
        with job:
            pass
