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
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Any

# The interpreter puts this file's folder first, whose modules are none of the environment's.
sys.path[0] = os.getcwd()

OLDEST, FIRST_WITH_TASKS, FIRST_OTHER = (0, 1, 14), (0, 4), (0, 5)
"""Versions with `load_environment(name)`, `run_rollout(input, client, ...)` and `requires_group_rollouts`, those with
tasksets and `run_episode`, and those that nobody has tried."""
SUPPORTED = "0.1.14 or newer, and older than 0.5"
OPENING = "(The environment begins.)"
"""Stands in the data for a prompt that is not in the task."""
REMEDY = "make its data with `python -m verl.utils.data prepare verifiers`"
OTHER = (
    "is another one than in the data: they were made with other arguments or another version, or the environment draws "
    "its samples without a seed"
)
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
    if not OLDEST <= _numbers(found) < FIRST_OTHER:
        return {"version": found, "missing": f"has verifiers {found}, and {SUPPORTED} is needed"}
    module = environment.split("/")[-1].replace("-", "_")
    ships = _numbers(found) >= FIRST_WITH_TASKS and importlib.util.find_spec(f"verifiers.v1.tasksets.{module}")
    if not ships and importlib.util.find_spec(module) is None:
        return {"version": found, "missing": f"has no module {module} of the environment {environment}"}
    return {"version": found, "missing": None}


def _numbers(found: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", found)[:3])


def environment_of(name: str, arguments: dict[str, Any]) -> Environment | Tasks:
    """Raises Fault if it cannot be used."""
    if missing := check(name)["missing"]:
        raise Fault(f"{sys.executable} {missing}")
    kind = Tasks if _numbers(version("verifiers")) >= FIRST_WITH_TASKS else Environment
    try:
        return kind(name, arguments)
    except (Exception, SystemExit) as exc:
        if isinstance(exc, Fault):
            raise
        raise Fault(f"the environment {name} cannot be loaded with {arguments}: {_told(exc)}") from exc


class Environment:
    """An environment of verifiers up to 0.3, with its data."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        """Raises Fault if it cannot be used."""
        self._http: Any = None
        import verifiers

        self._environment = verifiers.load_environment(name, **arguments)
        self._rows = {"train": self._environment.build_dataset(), "test": self._environment.build_eval_dataset()}
        logging.getLogger("verifiers").addHandler(Unscored())  # its own set-up, which is over now, removes others
        if self._environment.requires_group_rollouts:
            raise Fault(f"the environment {name} rewards samples of a group together, which is not supported")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

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
            raise Fault(f"the environment has no sample {index!r} of {split!r}: {REMEDY}")
        row = rows[index]
        if digest(row) != info.get("digest"):
            raise Fault(f"sample {index} of {split} {OTHER}")
        return dict(row)


class Tasks:
    """An environment of verifiers 0.4: a taskset, and one agent that does its tasks."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        """`arguments` is its block of configuration (`taskset`, `agent`, ...). Unless it says otherwise the agent runs
        no code: its harness is `null`, on this host. Raises whatever verifiers raises."""
        import verifiers.v1
        from verifiers.v1.utils.loaders import resolve_env_config

        # Its programs are started with uv, which may be installed beside this interpreter alone.
        os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', '')}"
        block = {**arguments, "taskset": {"id": name, **arguments.get("taskset", {})}}
        if not arguments.get("id") and "agent" in type(resolve_env_config(block)).model_fields:
            harmless = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
            block["agent"] = {**harmless, **arguments.get("agent", {})}
        self._environment = verifiers.v1.load_environment(resolve_env_config(block))
        self._more = iter(self._environment.taskset)
        self._tasks: list[Any] = []

    def serving(self) -> AbstractAsyncContextManager[None]:
        return self._environment.serving()  # type: ignore[no-any-return]

    def rows(self, split: str, limit: int) -> list[dict[str, Any]]:
        """Of `train`: a taskset has one split, which its configuration chooses."""
        if split != "train":
            return []
        self._read(limit)
        return [
            {"split": split, "index": index, "digest": task.key[:16], "prompt": _prompt(task.data), "truth": ""}
            for index, task in enumerate(self._tasks[:limit])
        ]

    async def rollout(self, asked: dict[str, Any]) -> dict[str, Any]:
        """As `Environment.rollout`."""
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        task = self._task(asked["sample"].get("extra_info") or {})
        variable = f"VERL_API_KEY_{asked['id']}"  # programs of the environment get no variable of such a name
        os.environ[variable] = asked["api_key"]
        try:
            client = EvalClientConfig(base_url=asked["base_url"], api_key_var=variable)
            episode = await self._environment.run_episode(task, ModelContext(asked["model"], client))
        finally:
            del os.environ[variable]
        if errors := [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]:
            return {"error": f"{errors[0].type}: {errors[0].message}"}
        if len(episode.traces) != 1:
            raise Fault(f"the environment has {len(episode.traces)} agents for one task, and one is supported")
        trace = episode.traces[0]
        if not any(trace.rewards.values()) or not math.isfinite(trace.reward):
            return {"error": f"the environment gave the rewards {trace.rewards}"}
        rewards = {f"reward/{name}": reward.score for name, reward in trace.rewards.items() if reward}
        metrics = {name: float(value) for name, value in {**trace.metrics, **rewards}.items() if _is_number(value)}
        return {"score": float(trace.reward), "metrics": metrics}

    def _read(self, count: int) -> None:
        self._tasks += islice(self._more, max(0, count - len(self._tasks)))

    def _task(self, info: dict[str, Any]) -> Any:
        split, index = info.get("environment_split"), info.get("index")
        if isinstance(index, int) and index >= 0:
            self._read(index + 1)
        if split != "train" or not isinstance(index, int) or not 0 <= index < len(self._tasks):
            raise Fault(f"the environment has no sample {index!r} of {split!r}: {REMEDY}")
        if self._tasks[index].key[:16] != info.get("digest"):
            raise Fault(f"sample {index} of {split} {OTHER}")
        return self._tasks[index]


def _prompt(data: Any) -> list[dict[str, Any]]:
    said = data.prompt
    messages = _plain(said if said is None or isinstance(said, str) else [one.model_dump() for one in said])
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, *(messages or [{"role": "user", "content": OPENING}])]


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

    def __init__(self, environment: Environment | Tasks | Fault, answers: Any) -> None:
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
        environment = environment_of(options["environment"], options.get("arguments") or {})
    except Fault as exc:
        await _answer(exc, answers)
    else:
        async with environment.serving():
            await _answer(environment, answers)


async def _answer(environment: Environment | Tasks | Fault, answers: Any) -> None:
    server = Server(environment, answers)
    threading.Thread(target=server.read, daemon=True).start()
    await server.over.wait()
    await server.close()


def _write_rows(options: dict[str, Any], path: str) -> int:
    try:
        environment = environment_of(options["environment"], options.get("arguments") or {})
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
