"""A game on a server of OpenEnv, with its own package. `python openenv_server.py SESSIONS` prints its port.

What the reset of a sample is given in `trouble` happens at the first step.
"""

import os
import socket
import sys
import time

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Said(Observation):
    text: str = ""
    tries: int = 0


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._number, self._tries, self._trouble = 0, 0, ""

    def reset(self, seed=None, episode_id=None, number=5, trouble="", **kwargs):
        self._number, self._tries, self._trouble = number, 0, trouble
        return Said(text=f"Find a number up to {2 * number}.", done=False, reward=None)

    def step(self, action, timeout_s=None, **kwargs):
        self._tries += 1
        if self._trouble == "crash":
            raise RuntimeError("the board is gone")
        if self._trouble == "exit":
            os._exit(3)
        if self._trouble == "hang":
            time.sleep(4)
        if self._trouble == "no number":
            return Said.model_construct(text="?", done=True, reward="much", metadata={})
        guess = int("".join(filter(str.isdigit, action.message))[:3] or -1)
        right = guess == self._number
        text = "right" if right else "higher" if guess < self._number else "lower"
        return Said(text=text, tries=self._tries, done=right, reward=1.0 if right else -0.25)

    @property
    def state(self):
        return State(step_count=self._tries)


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Said, max_concurrent_envs=int(sys.argv[1]))
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
