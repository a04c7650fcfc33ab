"""`SlowEngine` as a program that has the arguments of vLLM's server.

python -m tests.checkpoint_engine.conformance.slow_server --model DIR --host HOST --port PORT ... [--fails]
"""

from __future__ import annotations

import argparse
import sys
from http.server import ThreadingHTTPServer
from pathlib import Path

from tests.checkpoint_engine.conformance.slow_engine import SlowEngine
from tests.http_server import handler_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--fails", action="store_true")
    options, _ = parser.parse_known_args()
    if options.fails:
        sys.exit("RuntimeError: no memory for the KV cache")
    engine = SlowEngine(options.model)

    def answer(method: str, path: str, body: bytes) -> tuple[int, bytes] | None:
        return (200, b"") if path == "/health" else engine.answer(method, path, body)

    ThreadingHTTPServer((options.host, options.port), handler_of(answer)).serve_forever()


if __name__ == "__main__":
    main()
