"""Another user of the host, next to a run."""

import pytest
from psutil import CONN_LISTEN

from tests.strangers import HEARS_NOTHING_S, NOBODY, needs_root, talk

pytestmark = pytest.mark.e2e


@needs_root
def test_trainer_ranks_listen_inside_of_the_host_and_answer_nobody_else(start, warm):
    job = start("trainer.total_training_steps=1000", "trainer.save_freq=1", warm=warm)
    with job:
        job.wait_for_checkpoint(1)
        ranks = job.find("ray::ActorRolloutRefWorker", "ray::trainer.")
        assert len(ranks) == 2
        places = [
            one.laddr
            for rank in ranks
            for one in rank.net_connections("inet")
            if one.status == CONN_LISTEN and one.laddr.ip != "::"  # Ray itself, which asks for a token
        ]
        assert len(places) >= len(ranks)  # torch's store, gloo of every rank
        assert {place.ip for place in places} == {"127.0.0.1"}
        assert set(talk([tuple(place) for place in places], NOBODY, HEARS_NOTHING_S)) <= {"shut out", "nothing"}
        job.wait_for_checkpoint(2)
