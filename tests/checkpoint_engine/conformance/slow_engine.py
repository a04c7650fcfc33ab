"""A serving engine of transformers with vLLM's routes, adapters, a prefix cache, requests in flight, and switches that
break it. It shows what a run says of a fault that is known; whether a real engine is right, real engines show."""

from __future__ import annotations

import copy
import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.http_server import client_has_left, http_server
from verl.checkpoint_engine.conformance.sequence import IN_FLIGHT

State = dict[str, torch.Tensor]
Loader = Callable[[State, State], State]
"""(what the engine had, what the files say) to what it has then."""


class SlowEngine:
    """Faults are attributes: set one, and the engine has it from the next request on."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.heal()
        self._label, self._paused, self._running = "default", False, 0
        self._cache: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._adapters: dict[str, tuple[Path, Any]] = {}
        """Name to its directory, and the model with it."""
        self._left: set[tuple[str, tuple[int, ...]]] = set()
        """Prompts whose clients have left."""
        self._mode, self._num_loads, self._asleep = "wait", 0, 0
        self._num_begun = 0
        """Answers that have a token."""
        self._hits = 0
        self._to_load: Path | None = None
        """Loaded between two tokens of an answer."""
        self._step, self._may_run = threading.Lock(), threading.Condition()

    def heal(self) -> None:
        self.loader: Loader = lambda _, new: new
        self._era = getattr(self, "_era", 0) + 1
        """Loads and resumes that are late, and began before, do not come any more."""
        self.longest = 256
        self.keeps_weights_asleep = self.wakes_as_a_copy = False
        self.keeps_cache_of_the_left = self.drops_kept = self.keeps_kept_cache = self.aborts_nothing = False
        self.keeps_merged_base = self.drops_adapters = False
        self.model = getattr(self, "_loads_into", self.model)
        self._loads_into = self.model
        self.leaks_adapters = self.ignores_adapters = False
        self.keeps_cache = self.ignores_pause = self.drops_running = self.ignores_resume = False
        self.after_answer_s = self.step_s = 0.0
        self.named: Callable[[str], str] = lambda label: label
        self.decodes_with: Any = None
        self.names_on_pause: str | None = None
        self.hangs_s = 0.0
        self.resumes_itself_s: float | None = None
        self.takes_halves = self.refuses_after_failure = self.dies_of_failure = self.has_failed = False
        with getattr(self, "_may_run", threading.Condition()):
            self._paused = False
            if hasattr(self, "_may_run"):
                self._may_run.notify_all()

    @property
    def _is_dead(self) -> bool:
        return self.dies_of_failure and self.has_failed

    def load(self, directory: Path) -> None:
        if self.refuses_after_failure and self.has_failed:
            raise RuntimeError("an update is already active")
        try:
            new = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
        except Exception:
            self.has_failed = True
            if not self.takes_halves:
                raise
            new = _whole_tensors(directory)
        with self._step, torch.no_grad():
            old = {name: tensor.clone() for name, tensor in self._loads_into.state_dict().items()}
            for name, tensor in self.loader(old, dict(new)).items():
                self._loads_into.state_dict()[name].copy_(tensor)
            self._num_loads += 1
        if not self.keeps_merged_base:
            self._adapters = {name: (place, self._merged(place)) for name, (place, _) in self._adapters.items()}

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes] | None:
        if self._is_dead:
            return None
        path, _, query = path.partition("?")
        try:
            found = self._answer(path, {**dict(parse_qsl(query)), **json.loads(body or b"{}")})
        except Exception as exc:  # noqa: BLE001 - as a server's web framework does
            return 500, json.dumps({"error": {"message": f"{type(exc).__name__}: {exc}"}}).encode()
        return (
            (404, b"{}") if found is None else (200, found if isinstance(found, bytes) else json.dumps(found).encode())
        )

    def _answer(self, path: str, body: dict[str, Any]) -> Any:
        said: dict[str, Callable[[], Any]] = {
            "/health": lambda: b"",
            "/v1/models": lambda: {"data": [{"id": "slow", "max_model_len": self.longest}]},
            "/version": lambda: {"version": "of transformers"},
            "/metrics": lambda: f'vllm:prefix_cache_hits_total{{engine="0"}} {self._hits}\n'.encode(),
            "/weight_info": lambda: {"weight_version": self._label},
            "/is_paused": lambda: {"is_paused": self._paused},
            "/is_sleeping": lambda: {"is_sleeping": bool(self._asleep)},
            "/sleep": lambda: self._sleep(int(body["level"])),
            "/wake_up": self._wake_up,
        }
        if path in said:
            return said[path]()
        if path == "/pause":
            self._mode = body.get("mode", "wait")
            return self._pause()
        if path == "/resume":
            with self._may_run:
                self._paused = self._paused and self.ignores_resume
                self._may_run.notify_all()
            return {}
        if path == "/collective_rpc":
            return self._reload(Path(body["kwargs"]["weights_path"]))
        if path in ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"):
            if path == "/reset_prefix_cache" and not self.keeps_cache:
                kept = self._left if self.keeps_cache_of_the_left else ()
                self._cache = {key: past for key, past in self._cache.items() if key in kept}
            return {"success": True}
        if path == "/update_weight_version":
            self._label = self.named(body["new_version"])
            return {"success": True}
        if path == "/v1/completions":
            return self._complete(body["model"], body["prompt"], body["max_tokens"], "prompt_logprobs" in body)
        if path == "/v1/load_lora_adapter":
            return self._load_adapter(body["lora_name"], Path(body["lora_path"]))
        if path == "/v1/unload_lora_adapter":
            if body["lora_name"] not in self._adapters:
                raise KeyError(f"The lora adapter '{body['lora_name']}' cannot be found.")
            del self._adapters[body["lora_name"]]
            return b"Success"
        return None

    def _load_adapter(self, name: str, directory: Path) -> bytes:
        new = self._merged(directory)
        before = self._adapters.get(name, (directory, new))[1].state_dict()
        with self._step, torch.no_grad():
            for key, tensor in self.loader(dict(before), new.state_dict()).items():
                new.state_dict()[key].copy_(tensor)
        if not self.keeps_cache:
            self._cache = {key: past for key, past in self._cache.items() if key[0] != name}
        self._adapters[name] = directory, new
        return b"Success"

    def _merged(self, directory: Path) -> Any:
        return PeftModel.from_pretrained(copy.deepcopy(self.model), directory).merge_and_unload().eval()

    def _sleep(self, level: int) -> dict[str, Any]:
        self._cache.clear()
        self._asleep = level
        if level > 1 and not self.keeps_weights_asleep:
            with self._step, torch.no_grad():
                for tensor in self.model.state_dict().values():
                    tensor.zero_()
        return {}

    def _wake_up(self) -> dict[str, Any]:
        self._asleep = 0
        if self.wakes_as_a_copy:
            self.model = copy.deepcopy(self._loads_into)
        return {}

    def _model_of(self, name: str) -> Any:
        if self.leaks_adapters and self._adapters:
            return next(iter(self._adapters.values()))[1]
        if name in self._adapters and not self.ignores_adapters:
            return self._adapters[name][1]
        return self.model

    def _pause(self) -> dict[str, Any]:
        if self.names_on_pause is not None:
            self._label = self.names_on_pause
            time.sleep(0.2)
        with self._may_run:
            if self.drops_running:
                self._may_run.wait_for(lambda: self._running, timeout=60)
            if self.drops_adapters and self._adapters:
                self._may_run.wait_for(lambda: self._running > IN_FLIGHT, timeout=60)
            if self._mode != "wait" and (self.drops_kept or self.keeps_kept_cache or self.aborts_nothing):
                begun = self._num_begun
                self._may_run.wait_for(lambda: self._num_begun > begun, timeout=60)
            self._paused = not self.ignores_pause
            while self._running and self._mode == "wait" and not self.ignores_pause:
                self._may_run.wait(0.1)
        with self._step:
            """A token that is being computed."""
        if self.resumes_itself_s is not None:
            era = self._era
            later = threading.Timer(self.resumes_itself_s, lambda: era == self._era and self._answer("/resume", {}))
            later.start()
        return {}

    def _load_what_waits(self) -> None:
        with self._may_run:
            if self._to_load is not None:
                self.load(self._to_load)
                self._to_load = None
                self._may_run.notify_all()

    def _reload(self, directory: Path) -> dict[str, Any]:
        era = self._era
        time.sleep(self.hangs_s)
        if era != self._era:
            return {"results": [None]}
        if self.ignores_pause:
            with self._may_run:
                self._to_load = directory
                self._may_run.wait_for(lambda: self._to_load is None, timeout=60)
        elif self.after_answer_s:
            threading.Timer(self.after_answer_s, lambda: era == self._era and self.load(directory)).start()
        else:
            self.load(directory)
        return {"results": [None]}

    @torch.inference_mode()
    def _complete(self, name: str, prompt: list[int], num_tokens: int, prompt_too: bool) -> dict[str, Any] | None:
        if len(prompt) + num_tokens > self.longest:
            raise ValueError(f"at most {self.longest} tokens")
        with self._may_run:
            while self._paused and not self._is_dead:
                self._may_run.wait(0.1)
            if self._is_dead:
                raise RuntimeError("the engine is dead")
            self._running += 1
        try:
            return self._generate(name, prompt, num_tokens, prompt_too)
        finally:
            with self._may_run:
                self._running -= 1
                self._may_run.notify_all()

    def _generate(self, name: str, prompt: list[int], num_tokens: int, prompt_too: bool) -> dict[str, Any] | None:
        ids, served = torch.tensor([prompt]), self._model_of(name)
        if prompt_too:
            with self._step:
                scores = served(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            places = [{str(token): {"logprob": float(scores[at, token])}} for at, token in enumerate(prompt[1:])]
            return {"choices": [{"prompt_logprobs": [None, *places], "finish_reason": "length", "token_ids": []}]}
        key = name, tuple(prompt)
        with self._step:
            if key in self._cache and len(prompt) >= 128:
                self._hits += len(prompt)
            else:
                read = served(input_ids=ids[:, :-1], use_cache=True)
                self._cache[key] = read.past_key_values
            past, loads = copy.deepcopy(self._cache[key]), self._num_loads
        token, tokens, log_probs = prompt[-1], [], []
        for number in range(num_tokens):
            if number == num_tokens // 2:
                self._load_what_waits()
            if (self.drops_running and self._paused) or (self.drops_kept and self._mode == "keep" and self._paused):
                return None
            if self.drops_adapters and self._paused and name in self._adapters:
                return None
            if client_has_left():
                self._left.add(key)
                return None
            if self._paused and self._mode == "abort" and not self.aborts_nothing:
                return _answered(tokens, log_probs, "abort")
            with self._unless_kept():
                if loads != self._num_loads and not self.keeps_kept_cache:
                    past = served(input_ids=torch.tensor([[*prompt, *tokens][:-1]]), use_cache=True).past_key_values
                    loads = self._num_loads
                model = self.decodes_with or served
                found = model(input_ids=torch.tensor([[token]]), past_key_values=past, use_cache=True)
            scores = found.logits[0, -1].log_softmax(-1)
            if number == 0:
                with self._may_run:
                    self._num_begun += 1
                    self._may_run.notify_all()
            token = int(scores.argmax())
            tokens.append(token)
            log_probs.append(float(scores[token]))
            time.sleep(self.step_s)
        return _answered(tokens, log_probs, "length")

    @contextmanager
    def _unless_kept(self) -> Iterator[None]:
        """While nothing is loaded. Waits while the requests that run are kept."""
        while True:
            with self._step:
                if not (self._paused and self._mode == "keep"):
                    yield
                    return
            with self._may_run:
                self._may_run.wait(0.02)


def _answered(tokens: list[int], log_probs: list[float], reason: str) -> dict[str, Any]:
    return {"choices": [{"token_ids": tokens, "logprobs": {"token_logprobs": log_probs}, "finish_reason": reason}]}


def _whole_tensors(directory: Path) -> State:
    """Those that lie before the end of a file that is cut off."""
    found = {}
    for file in directory.glob("*.safetensors"):
        data = file.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        for name, entry in json.loads(data[8 : 8 + length]).items():
            begin, end = (8 + length + offset for offset in entry.get("data_offsets", (0, 0)))
            if begin < end <= len(data):
                values = torch.frombuffer(bytearray(data[begin:end]), dtype=torch.float32)
                found[name] = values.reshape(entry["shape"])
    return found


@contextmanager
def slow_engine(directory: Path) -> Iterator[tuple[SlowEngine, str]]:
    engine = SlowEngine(directory)
    with http_server(engine.answer) as url:
        yield engine, url
