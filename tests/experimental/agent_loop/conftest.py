import pytest
import ray
from ray.exceptions import RayActorError

from tests.experimental.agent_loop.scripted_server import ScriptedServer
from verl.utils.builtin.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_path(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def server_pool(ray_cluster):
    """ScriptedServers that no test uses; starting a process takes longer than any test."""
    pool = []
    yield pool
    for server in pool:
        ray.kill(server)


@pytest.fixture
def start_server(server_pool):
    """A ScriptedServer that begins with the given script, alone in the hands of the test."""
    used = []

    def start(*script):
        while server_pool:
            server = server_pool.pop(0)
            try:
                ray.get(server.reset.remote(script))
            except RayActorError:  # an earlier test killed it
                continue
            break
        else:
            server = ray.remote(ScriptedServer).options(num_cpus=0.01).remote()
            ray.get(server.reset.remote(script))
        used.append(server)
        return server

    yield start
    server_pool.extend(used)
