"""A rollout server whose answers a test writes down. Light to import: it is started often."""

import asyncio
import os
from dataclasses import replace
from types import SimpleNamespace

from verl.workers.rollout.errors import NoWeights
from verl.workers.rollout.kept_calls import KeptCalls
from verl.workers.rollout.records import TokenOutput, WeightVersionSpan

NO_WEIGHTS = NoWeights("server has no weights")


def said(token_ids, stop_reason="completed", *, version=0, log_prob=-0.5, seen=()):
    return TokenOutput(
        list(token_ids),
        None if log_prob is None else [log_prob] * len(token_ids),
        stop_reason,
        (WeightVersionSpan(0, len(token_ids), version),) if token_ids else (),
        seen=seen,
    )


def token_spans(output, start, stop):
    """Of a part of its tokens."""
    inside = ((max(span.start, start), min(span.stop, stop), span.version) for span in output.weight_versions)
    return tuple(WeightVersionSpan(a - start, b - start, version) for a, b, version in inside if b > a)


class ScriptedServer:
    """A Ray actor that answers call after call with the next item of its script; the last one goes on for ever.

    An item is a TokenOutput (one that `died` is only told, and hangs), a function of the prompt's tokens that returns
    one, an exception to raise, "hang", "die", or "echo" (the largest character of the prompt, three times; a prompt
    that contains "fail!" raises and one that contains "hang!" hangs). Nobody gets an answer before `at_once` calls have
    been in flight at the same time.
    """

    async def reset(self, script, at_once=1):
        """For another test. What an earlier one has left in flight does not count in it."""
        self.now = SimpleNamespace(
            script=list(script) or ["echo"],
            at_once=at_once,
            enough=asyncio.Event(),
            given_up=asyncio.get_running_loop().create_future(),
            calls=[],
            caches=[],
            unfinished={},
            asked=[],
            kept=KeptCalls(),
            cancelled=0,
            in_flight=0,
            most_in_flight=0,
        )

    async def generate(self, prompt_ids, sampling, request_id, pictures=(), cache=None, name=None, written_to=None):
        if name is None:
            return await self.answered(prompt_ids, sampling, request_id, cache)
        with self.now.kept.during(request_id, name) as keep:
            output = await self.answered(prompt_ids, sampling, request_id, cache)
            keep(output)
        return output

    async def answered(self, prompt_ids, sampling, request_id, cache):
        now = self.now
        now.caches.append(cache)
        now.calls.append((list(prompt_ids), sampling, request_id))
        now.in_flight += 1
        now.most_in_flight = max(now.most_in_flight, now.in_flight)
        if now.in_flight >= now.at_once:
            now.enough.set()
        try:
            await now.enough.wait()
            item = now.script.pop(0) if len(now.script) > 1 else now.script[0]
            if isinstance(item, TokenOutput) and item.stop_reason == "died":
                now.unfinished[request_id] = item
                item = "hang"
            return await self.answer(item, prompt_ids)
        except asyncio.CancelledError:
            now.cancelled += 1
            raise
        finally:
            now.in_flight -= 1

    async def tokens_since(self, known):
        """Two tokens more of each at a time. None if nothing is to be told."""
        self.now.asked.append(known)
        return {
            request_id: replace(
                said(whole.token_ids[number : number + 2], "died"),
                log_probs=whole.log_probs[number : number + 2],
                weight_versions=token_spans(whole, number, number + 2),
            )
            for request_id, number in known.items()
            if (whole := self.now.unfinished.get(request_id)) and len(whole.token_ids) > number
        } or (None if not self.now.unfinished else {})

    async def answer(self, item, prompt_ids):
        text = "".join(chr(token + 33) for token in prompt_ids if token < 94)  # the byte tokenizer's printable ASCII
        if item == "hang" or (item == "echo" and "hang!" in text):
            return await asyncio.wait_for(asyncio.shield(self.now.given_up), 600)
        if item == "die":
            os._exit(1)
        if item == "echo" and "fail!" in text:
            raise RuntimeError("the engine said no")
        if isinstance(item, Exception):
            raise item
        if callable(item):
            return item(prompt_ids)
        if item == "echo":
            await asyncio.sleep(0.01)
            return said([ord(max(text)) - 33] * 3, version=7)
        return item

    async def forget_calls(self, owner, samples):
        self.now.kept.forget(owner, samples)

    async def take_calls(self, owner):
        return self.now.kept.take(owner, self.now.unfinished.get)

    async def give_up(self, output):
        """Answer with it what hangs."""
        self.now.given_up.set_result(output)

    async def seen(self):
        return {name: getattr(self.now, name) for name in ("calls", "caches", "cancelled", "most_in_flight", "asked")}
