"""`SlowEngine` with SGLang's routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.checkpoint_engine.conformance.slow_engine import SlowEngine
from tests.http_server import http_server


class SlowSGLang(SlowEngine):
    stays_paused = False
    """Whether it generates nothing after a resume that it has answered, as a rank that keeps itself paused."""
    num_paused = 0
    """Calls that have paused it."""

    def heal(self) -> None:
        super().heal()
        self.stays_paused = False

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes] | None:
        if path == "/ready" and not self._is_dead:
            return (503 if self._paused and not self.stays_paused else 200), b""
        return super().answer(method, path, body)

    def _answer(self, path: str, body: dict[str, Any]) -> Any:
        match path:
            case "/server_info":
                return {"version": "of transformers", "dtype": "float32", "tp_size": 1}
            case "/model_info":
                return {"weight_version": self._label}
            case "/pause_generation":
                self.num_paused += 1
                return self._pause()
            case "/continue_generation":
                return {} if self.stays_paused else super()._answer("/resume", {})
            case "/flush_cache":
                self._cache.clear()
                return b"Cache flushed."
            case "/update_weights_from_disk":
                self.load(Path(body["model_path"]))
                self._cache.clear()
                self._label = body["weight_version"]
                return {"success": True}
            case "/end_weight_update":
                return {"success": True}
            case "/generate":
                return self._generated(body)
            case _:
                return super()._answer(path, body)

    def _generated(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, whole = body["input_ids"], body.get("logprob_start_len") == 0
        (found,) = self._complete("", prompt, body["sampling_params"]["max_new_tokens"], whole)["choices"]
        about: dict[str, Any] = {"finish_reason": {"type": "length"}}
        if whole:
            places = found["prompt_logprobs"][1:]
            about["input_token_logprobs"] = [(0.0,), *((one["logprob"],) for place in places for one in place.values())]
        else:
            about["output_token_logprobs"] = [(value,) for value in found["logprobs"]["token_logprobs"]]
        return {"output_ids": found["token_ids"], "meta_info": about}


@contextmanager
def slow_sglang(directory: Path) -> Iterator[tuple[SlowSGLang, str]]:
    engine = SlowSGLang(directory)
    with http_server(engine.answer) as url:
        yield engine, url
