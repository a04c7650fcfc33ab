"""Resources servers of NeMo-Gym's own package. `python nemo_gym_server.py MODULE:CLASS ...` prints their ports."""

import asyncio
import importlib
import socket
import sys

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf


def app_of(target):
    """As its `run_webserver` makes it, without Ray and the head server that it asks for its address."""
    module, name = target.split(":")
    kind = getattr(importlib.import_module(module), name)
    nobody = ServerClient(
        head_server_config=BaseServerConfig(host="127.0.0.1", port=9), global_config_dict=OmegaConf.create({})
    )
    config = kind.model_fields["config"].annotation(
        host="127.0.0.1", port=0, name=name, entrypoint="app.py", domain="agent"
    )
    server = kind(config=config, server_client=nobody)
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    return app


async def serve(targets):
    servers = []
    for target in targets:
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        servers.append(uvicorn.Server(uvicorn.Config(app_of(target), log_level="error")).serve(sockets=[listening]))
        print(listening.getsockname()[1], flush=True)
    await asyncio.gather(*servers)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1:]))
