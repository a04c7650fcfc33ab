"""Questions to a serving engine that is not ours, over its public HTTP routes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import CheckpointEngineError, ConfigError, TransportTimeout
from ..parameter_server.http_server import HttpServer, Refused

DEV_MODE = "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Tokens generated for a prompt, greedily, and their log-probs as the server reports them."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    log_probs: Sequence[float]
    aborted: bool = False


class Probed(Protocol):
    """The interface that a run needs of a server. Methods block. They raise Refused, TransportError and
    TransportTimeout."""

    url: str
    engine: str

    def log_probs(self, prompt: Sequence[int]) -> list[float]:
        """Of every token of `prompt` but the first, computed now, not from a cache."""
        ...

    def continued(self, prompt: Sequence[int], num_tokens: int) -> Answer: ...
    def leave(self, prompt: Sequence[int], num_tokens: int, after_s: float) -> bool:
        """Send a request, and close its connection after `after_s`. Returns whether it was not answered by then."""
        ...

    def check_sleep(self, level: int) -> None:
        """Raises ConfigError with the reason if the server cannot sleep at `level`: 1 keeps weights, 2 does not."""
        ...

    def sleep(self, level: int) -> None: ...
    def wake_up(self) -> None: ...
    def label(self) -> str | None:
        """The version that the server reports; None if it reports none."""
        ...

    def longest(self) -> int:
        """The most tokens of a prompt and its answer together."""
        ...

    def dtype(self) -> str | None: ...
    def cache_hits(self) -> float | None:
        """Tokens read from the prefix cache so far; None if the server does not count them."""
        ...

    def digests(self) -> dict[str, str]:
        """Digest of each tensor that the server shows; empty if it shows none."""
        ...


class ProbedVLLM:
    """A server of vLLM: `vllm serve`, with or without VLLM_SERVER_DEV_MODE."""

    def __init__(self, url: str, *, timeout_s: float, name: str | None = None) -> None:
        """`name`: of the model in requests; default: the first that the server lists. Raises ConfigError."""
        self._http = HttpServer(url, timeout_s=timeout_s)
        self.url = self._http.url
        try:
            models = self._http.call("GET", "/v1/models")["data"]
            version = self._http.call("GET", "/version")["version"]
        except (KeyError, TypeError, Refused) as exc:
            raise ConfigError(f"the server at {url} is not vLLM: {exc}") from exc
        self.engine = f"vLLM {version}"
        self._longest = int(models[0].get("max_model_len") or 0)
        self.name = name or models[0]["id"]

    def _complete(
        self, prompt: Sequence[int], num_tokens: int, timeout_s: float | None = None, **more: Any
    ) -> dict[str, Any]:
        body = {
            "model": self.name,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        found = self._http.call("POST", "/v1/completions", body | more, timeout_s=timeout_s)
        answer: dict[str, Any] = found["choices"][0]
        return answer

    def log_probs(self, prompt: Sequence[int]) -> list[float]:
        places = self._complete(prompt, 1, prompt_logprobs=0)["prompt_logprobs"]
        return [float(place[str(token)]["logprob"]) for place, token in zip(places[1:], prompt[1:], strict=True)]

    def continued(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        found = self._complete(prompt, num_tokens, logprobs=0)
        tokens = found["token_ids"] or []
        log_probs = (found["logprobs"] or {}).get("token_logprobs") or []
        return Answer(
            prompt=prompt,
            tokens=tokens,
            log_probs=log_probs,
            aborted=found.get("finish_reason") not in ("length", "stop"),
        )

    def leave(self, prompt: Sequence[int], num_tokens: int, after_s: float) -> bool:
        try:
            self._complete(prompt, num_tokens, timeout_s=after_s)
        except TransportTimeout:
            return True
        return False

    def check_sleep(self, level: int) -> None:
        try:
            self._http.call("GET", "/is_sleeping")
        except Refused as exc:
            raise ConfigError(f"{self.url} has no /sleep: {DEV_MODE}") from exc

    def sleep(self, level: int) -> None:
        self._http.call("POST", f"/sleep?level={level}")

    def wake_up(self) -> None:
        self._http.call("POST", "/wake_up")

    def label(self) -> str | None:
        try:
            found: str = self._http.call("GET", "/weight_info")["weight_version"]
        except Refused:
            return None
        return found

    def longest(self) -> int:
        return self._longest

    def dtype(self) -> str | None:
        with suppress(CheckpointEngineError, KeyError, TypeError):
            found = self._http.call("GET", "/server_info?config_format=json")["vllm_config"]["model_config"]["dtype"]
            return str(found).removeprefix("torch.")
        return None

    def cache_hits(self) -> float | None:
        with suppress(CheckpointEngineError):
            for line in self._http.call("GET", "/metrics", is_json=False).splitlines():
                if line.startswith("vllm:prefix_cache_hits_total"):
                    return float(line.rpartition(" ")[2])
        return None

    def digests(self) -> dict[str, str]:
        with suppress(CheckpointEngineError, KeyError, TypeError):
            found: dict[str, str] = self._http.call("POST", "/weight_checker", {"action": "checksum"})["checksums"]
            return {name.rpartition(":")[2]: digest for name, digest in found.items()}
        return {}


class ProbedSGLang:
    """A server of SGLang: `sglang.launch_server`."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Raises ConfigError."""
        self._http = HttpServer(url, timeout_s=timeout_s)
        self.url = self._http.url
        try:
            about = self._http.call("GET", "/server_info")
            self.engine = f"SGLang {about['version']}"
            self._dtype = str(about["dtype"])
            self._saves_memory = bool(about.get("enable_memory_saver"))
            self._keeps_weights = bool(about.get("enable_weights_cpu_backup"))
            self._longest = int(self._http.call("GET", "/v1/models")["data"][0]["max_model_len"] or 0)
        except (KeyError, TypeError, Refused) as exc:
            raise ConfigError(f"the server at {url} is not SGLang 0.5: {exc}") from exc
        self._hits = 0

    def _generate(
        self, prompt: Sequence[int], num_tokens: int, timeout_s: float | None = None, **more: Any
    ) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}
        answer: dict[str, Any] = self._http.call("POST", "/generate", body | more, timeout_s=timeout_s)
        self._hits += int(answer["meta_info"].get("cached_tokens") or 0)
        return answer

    def log_probs(self, prompt: Sequence[int]) -> list[float]:
        places = self._generate(prompt, 1, logprob_start_len=0)["meta_info"]["input_token_logprobs"]
        return [float(log_prob) for log_prob, *_ in places[1:]]

    def continued(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        found = self._generate(prompt, num_tokens)
        about = found["meta_info"]
        return Answer(
            prompt=prompt,
            tokens=found.get("output_ids") or [],
            log_probs=[float(log_prob) for log_prob, *_ in about.get("output_token_logprobs") or ()],
            aborted=(about.get("finish_reason") or {}).get("type") not in ("length", "stop"),
        )

    def leave(self, prompt: Sequence[int], num_tokens: int, after_s: float) -> bool:
        try:
            self._generate(prompt, num_tokens, timeout_s=after_s)
        except TransportTimeout:
            return True
        return False

    def check_sleep(self, level: int) -> None:
        if not self._saves_memory:
            raise ConfigError(f"{self.url} keeps its memory: start SGLang with --enable-memory-saver")
        if self._keeps_weights != (level == 1):
            kept = "keeps its weights" if self._keeps_weights else "loses its weights"
            raise ConfigError(f"{self.url} {kept}: --enable-weights-cpu-backup decides")

    def sleep(self, level: int) -> None:
        self._http.call("POST", "/release_memory_occupation", {}, is_json=False)

    def wake_up(self) -> None:
        self._http.call("POST", "/resume_memory_occupation", {}, is_json=False)

    def label(self) -> str | None:
        found: str = self._http.call("GET", "/model_info")["weight_version"]
        return found

    def longest(self) -> int:
        return self._longest

    def dtype(self) -> str | None:
        return self._dtype if self._dtype != "auto" else None

    def cache_hits(self) -> float | None:
        return float(self._hits)

    def digests(self) -> dict[str, str]:
        with suppress(CheckpointEngineError, KeyError, TypeError, IndexError):
            found: dict[str, str] = self._http.call("POST", "/weights_checker", {})["ranks"][0]["checksums"]
            return found
        return {}
