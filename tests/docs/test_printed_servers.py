"""The printed commands that start a server of vLLM: its own parser takes them, and they need no distribution `vllm`."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from tests.docs.printed import printed
from tests.warm_workers import WarmWorkers, written_by

SERVERS = [one for one in printed() if re.search(r"vllm\.entrypoints|\bvllm serve", one.text)]


def test_every_printed_server_has_what_vllm_for_cpus_needs():
    assert len(SERVERS) >= 8
    for server in SERVERS:
        assert server.words[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"], f"{server}: asks for `vllm`"
        assert server.environment == {"VLLM_SERVER_DEV_MODE": "1"}
        assert "--gpu-memory-utilization" in server.words, f"{server}: takes 92 % of a CPU's memory"


def test_vllm_understands_every_printed_server(warm: WarmWorkers, tmp_path: Path):
    (tmp_path / "servers.json").write_text(json.dumps([server.words[3:] for server in SERVERS]))
    path = os.pathsep.join(path for path in sys.path if path)
    written = written_by(warm, "tests.docs.vllm_parser", tmp_path / "servers.json", PYTHONPATH=path)
    models = [server.words[server.words.index("--model") + 1] for server in SERVERS]
    assert written.splitlines()[-len(SERVERS) :] == [f"{model} 0.5" for model in models]
