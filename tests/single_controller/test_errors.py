import pickle

from verl.single_controller import WorkerDied, WorkerFailed, WorkerTimeout


def test_errors_keep_their_fields_across_processes():
    died = pickle.loads(pickle.dumps(WorkerDied("gone", group="actor", rank=0, pid=7, node="10.0.0.1")))
    assert (str(died), died.group, died.rank, died.pid, died.node) == ("gone", "actor", 0, 7, "10.0.0.1")
    failed = pickle.loads(pickle.dumps(WorkerFailed("bad", group="actor", rank=1, traceback="Traceback: x\n")))
    assert str(failed) == "bad\n\nTraceback: x"
    timeout = pickle.loads(pickle.dumps(WorkerTimeout("late", group="actor")))
    assert isinstance(timeout, TimeoutError)
    assert timeout.rank is None
