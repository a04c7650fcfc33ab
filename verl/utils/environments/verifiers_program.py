"""Runs an environment of `verifiers`, by the interpreter that has it: a file of its own, which needs nothing of verl.

    PYTHON verifiers_program.py check  '{"environment": NAME}'
    PYTHON verifiers_program.py rows   '{"environment": NAME, "arguments": {...}, "limit": N}' TO.jsonl
    PYTHON verifiers_program.py serve  '{"environment": NAME, "arguments": {...}}'

`check` prints {version, missing} as JSON, and imports nothing of the environment. `rows` writes a line {split, index,
digest, prompt, truth} for each of the environment's samples. `serve` runs rollouts, in the protocol of
`verl.experimental.agent_loop.agent_program.AgentProgram`.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import logging
import math
import os
import re
import sys
import threading
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from typing import Any

# The interpreter puts this file's folder first, whose modules are none of the environment's.
sys.path[0] = os.getcwd()

OLDEST, FIRST_OTHER = (0, 1, 14), (0, 4)
"""Versions with `load_environment(name)`, `run_rollout(input, client, ...)` and `requires_group_rollouts`."""
SUPPORTED = "0.1.14 or newer, and older than 0.4"
HANG_S = 10.0
"""What does not end within this time after it was cancelled holds all others, and ends with the process."""
LAST_WORDS_S = 4.0
"""After stdin was closed."""


_unscored: ContextVar[list[str]] = ContextVar("unscored")
"""Of the running rollout."""


class Unscored(logging.Handler):
    """Notes that a reward function raised: verifiers logs it, and goes on with 0."""

    def emit(self, record: logging.LogRecord) -> None:
        if (said := record.getMessage()).startswith("Error calling"):
            _unscored.get([]).append(said)


class Fault(Exception):
    """What no rollout of this environment can be run with: it ends the run."""


def check(environment: str) -> dict[str, Any]:
    """`missing` says in words what is, or is null."""
    try:
        found = version("verifiers")
    except PackageNotFoundError:
        return {"version": None, "missing": "has no package verifiers"}
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if not OLDEST <= numbers < FIRST_OTHER:
        return {"version": found, "missing": f"has verifiers {found}, and {SUPPORTED} is needed"}
    module = environment.split("/")[-1].replace("-", "_")
    if importlib.util.find_spec(module) is None:
        return {"version": found, "missing": f"has no module {module} of the environment {environment}"}
    return {"version": found, "missing": None}


class Environment:
    """An environment of verifiers, with its data."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        """Raises Fault if it cannot be used."""
        self._http: Any = None
        if missing := check(name)["missing"]:
            raise Fault(f"{sys.executable} {missing}")
        import verifiers

        try:
            self._environment = verifiers.load_environment(name, **arguments)
            self._rows = {"train": self._environment.build_dataset(), "test": self._environment.build_eval_dataset()}
        except Exception as exc:
            raise Fault(f"the environment {name} cannot be loaded with {arguments}: {_told(exc)}") from exc
        logging.getLogger("verifiers").addHandler(Unscored())  # its own set-up, which is over now, removes others
        if self._environment.requires_group_rollouts:
            raise Fault(f"the environment {name} rewards samples of a group together, which is not supported")

    def rows(self, split: str, limit: int) -> list[dict[str, Any]]:
        found = self._rows[split]
        if found is None:
            return []
        return [
            {
                "split": split,
                "index": index,
                "digest": digest(row),
                "prompt": _plain(row["prompt"]),
                "truth": str(row.get("answer") or ""),
            }
            for index, row in enumerate(found.select(range(min(limit, len(found)))))
        ]

    async def rollout(self, asked: dict[str, Any]) -> dict[str, Any]:
        """{score, metrics}, or {error} of this sample alone. Raises Fault for a sample of another environment."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient
        from verifiers.clients import OpenAIChatCompletionsClient

        row = self._row(asked["sample"].get("extra_info") or {})
        # One for all samples: each loads the world's certificates.
        self._http = self._http or DefaultAsyncHttpxClient(timeout=None)
        place = {"base_url": asked["base_url"], "api_key": asked["api_key"]}
        client = AsyncOpenAI(**place, http_client=self._http, timeout=None, max_retries=0)
        unscored: list[str] = []
        _unscored.set(unscored)
        output = await self._environment.run_rollout(row, OpenAIChatCompletionsClient(client), asked["model"], {})
        if error := output.get("error"):
            return {"error": _shown(error)}
        if unscored:
            return {"error": unscored[0]}
        reward = output.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
            return {"error": f"the environment gave the reward {reward!r}"}
        metrics = {name: value for name, value in (output.get("metrics") or {}).items() if _is_number(value)}
        return {"score": float(reward), "metrics": {name: float(value) for name, value in metrics.items()}}

    def _row(self, info: dict[str, Any]) -> dict[str, Any]:
        split, index = str(info.get("environment_split")), info.get("index")
        rows = self._rows.get(split)
        if rows is None or not isinstance(index, int) or not 0 <= index < len(rows):
            raise Fault(
                f"the environment has no sample {index!r} of {split!r}: make its data with "
                "`python -m verl.utils.data prepare verifiers`"
            )
        row = rows[index]
        if digest(row) != info.get("digest"):
            raise Fault(
                f"sample {index} of {split} is another one than in the data: they were made with other arguments or "
                "another version, or the environment draws its samples without a seed"
            )
        return dict(row)


def digest(row: dict[str, Any]) -> str:
    """Tells one sample from another."""
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _plain(prompt: Any) -> list[dict[str, Any]]:
    """Messages without nulls, which data sets put into fields that other rows have."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _shown(error: Any) -> str:
    """Of an exception, or of verifiers' record of one."""
    if isinstance(error, dict):
        return str(error.get("error_chain_str") or error.get("error_chain_repr") or error.get("error") or error)
    return str(error)


def _told(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


class Server:
    """Rollouts of many samples at once. Its threads read, and see what hangs; rollouts share the event loop."""

    def __init__(self, environment: Environment | Fault, answers: Any) -> None:
        self._environment = environment
        self._answers = answers
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, asyncio.Task[None]] = {}
        self.over = asyncio.Event()

    def read(self) -> None:
        """On a thread, until stdin ends."""
        for line in sys.stdin.buffer:
            asked = json.loads(line)
            if asked.get("cancel"):
                self._watch(HANG_S, lambda number=asked["id"]: number in self._running, "does not end what is over")
            self._loop.call_soon_threadsafe(self._handle, asked)
        self._watch(LAST_WORDS_S, lambda: True, "does not end")
        self._loop.call_soon_threadsafe(self.over.set)

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _handle(self, asked: dict[str, Any]) -> None:
        number = asked["id"]
        if not asked.get("cancel"):
            self._running[number] = asyncio.create_task(self._run(asked))
            self._running[number].add_done_callback(lambda _: self._running.pop(number))
        elif number in self._running:
            self._running[number].cancel()

    async def _run(self, asked: dict[str, Any]) -> None:
        said = {"id": asked["id"], "result": await self._result(asked)}
        self._answers.write(json.dumps(said) + "\n")
        self._answers.flush()

    async def _result(self, asked: dict[str, Any]) -> dict[str, Any]:
        if isinstance(self._environment, Fault):
            return {"fault": str(self._environment)}
        try:
            return await self._environment.rollout(asked)
        except Fault as exc:
            return {"fault": str(exc)}
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - an environment raises what it likes
            return {"error": _told(exc)}

    def _watch(self, seconds: float, hangs: Any, what: str) -> None:
        def end() -> None:
            if hangs():
                sys.stderr.write(f"the environment {what}: its process ends\n")
                sys.stderr.flush()
                os._exit(1)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()


async def _serve(options: dict[str, Any], answers: Any) -> None:
    try:
        environment: Environment | Fault = Environment(options["environment"], options.get("arguments") or {})
    except Fault as exc:
        environment = exc
    server = Server(environment, answers)
    threading.Thread(target=server.read, daemon=True).start()
    await server.over.wait()
    await server.close()


def _write_rows(options: dict[str, Any], path: str) -> int:
    try:
        environment = Environment(options["environment"], options.get("arguments") or {})
        rows = [row for split in ("train", "test") for row in environment.rows(split, options["limit"])]
    except Fault as exc:
        sys.stderr.write(f"{exc}\n")
        return 2
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


def main() -> int:
    command, options = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # environments print what they like
    if command == "check":
        answers.write(json.dumps(check(options["environment"])))
        answers.flush()
        return 0
    if command == "rows":
        return _write_rows(options, sys.argv[3])
    asyncio.run(_serve(options, answers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
