import ray

from verl.trainer.ppo.progress import Asked
from verl.utils.progress import Progress


def told(asked, seconds, expected):
    """Answers arrive when they arrive."""
    while asked(seconds) != expected:
        pass


def test_answers_of_all_are_added_up_and_nobody_is_waited_for(ray_cluster):
    @ray.remote(num_cpus=0.01)
    class Worker:
        def __init__(self, progress):
            self._progress = progress

        async def progress(self):
            return self._progress

    workers = [Worker.remote(of) for of in (Progress(1, 4, "answers", 3000), Progress(2, 4, "answers", 3200), None)]
    asked = Asked(lambda: [worker.progress.remote() for worker in workers])
    assert asked(1.0) == ""  # the question has just been sent
    told(asked, 2.0, "3/8 answers, 3.1k tok/s")
    for worker in workers:
        ray.kill(worker)
    told(asked, 3.0, "")


def test_who_cannot_be_asked_says_nothing():
    asked = Asked(lambda: [object().progress])
    assert asked(1.0) == asked(2.0) == ""
