"""An environment of verifiers, loaded by an interpreter of its own: guessing, and samples that do what they say."""

import asyncio
import time

import guess_the_number
import sum_of_two
import verifiers as vf
from datasets import Dataset


class Unruly(guess_the_number.Guessing):
    async def setup_state(self, state):
        told = state["answer"]
        if told == "crash":
            raise RuntimeError("the sandbox is gone")
        if told == "exit":
            raise SystemExit("no license")
        if told == "hang":
            await asyncio.Event().wait()
        if told == "chatter":
            print("loading", flush=True)
        if told == "process":
            await asyncio.create_subprocess_exec("sleep", "654.3", start_new_session=True)
            await asyncio.Event().wait()
        if told == "block":
            time.sleep(600)  # noqa: ASYNC251 - that is its fault

    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": "Again."}]

    @vf.stop
    async def is_guessed(self, state):
        return bool(state["trajectory"])


async def lies(answer, state):
    if answer == "nan":
        return float("nan")
    return None if answer == "no reward" else 1.0


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def load_environment(told, seed=0):
    rows = Dataset.from_list([{"question": f"do {each}", "answer": each} for each in told])
    unruly = Unruly(dataset=rows, rubric=vf.Rubric(funcs=[lies]))
    guessing = guess_the_number.load_environment(count=3, seed=seed)
    question = Dataset.from_list([{"question": "Call add.", "answer": "3"}])
    calling = vf.ToolEnv(tools=[add], dataset=question, rubric=vf.Rubric(funcs=[sum_of_two.is_right]))
    environments = [guessing, sum_of_two.load_environment(count=3), unruly, calling]
    return vf.EnvGroup(environments, env_names=["guess", "sum", "unruly", "calling"])
