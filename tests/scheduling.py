"""Which of several test processes runs which file, also after one of them has ended."""

import pytest

TOGETHER = ("test_background_staging.py", "test_bit_equality.py", "test_faults.py")
"""Files of `weight_sync` that share a vLLM engine: two test processes would both start it."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """One file goes to one test process, and so do those that share an engine."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "tests/weight_sync" if file.endswith(TOGETHER) else file

        def remove_node(self, node):
            """The test that ended its process has had its turn: xdist would run it again, and so on for ever. And it
            would give files that are done to a process, which then waits for ever for one of their tests to end."""
            files = self.assigned_work[node]
            ended = next((test for tests in files.values() for test, done in tests.items() if not done), None)
            if ended is not None:
                files[self._split_scope(ended)][ended] = True
            self.assigned_work[node] = {file: tests for file, tests in files.items() if not all(tests.values())}
            super().remove_node(node)
            return ended

        def _reschedule(self, node):
            """A test process begins a test when it has the next one. What is left of a file may be one test: with
            nothing after it, xdist would wait for its end for ever, and keep the files that are left."""
            super()._reschedule(node)
            while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                self._assign_work_unit(node)

    return Scheduling(config, log)
