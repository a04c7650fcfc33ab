"""The data set against PyPI's verl: the same rows become the same prompts, token by token, in the same order."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.originals.families import FAMILIES
from tests.originals.original import VERL, computed, differences
from verl.experimental.agent_loop.base import fit_prompt
from verl.utils.builtin.tokenizer import CHAT_TEMPLATE, build_tokenizer
from verl.utils.config import ConfigError
from verl.utils.dataset import RLHFDataset
from verl.workers.config import DataConfig

TEXTS = (
    "1+2?",
    "",
    " x ",
    "ü 𝄞 漢字",
    "line\nline\t",
    "<|end|>",
    "<tool_call>",
    "{{ x }}",
    "a" * 50,
    "</s>",
    "\u200b0",
)
NAMES = ("raw_prompt", "index", "tools_kwargs", "interaction_kwargs", "data_source", "reward_model", "ability")


def said(*texts: str, roles: tuple[str, ...] = ("user", "assistant")) -> list[dict[str, str]]:
    return [{"role": roles[number % len(roles)], "content": text} for number, text in enumerate(texts)]


def row(prompt: Any, **columns: Any) -> dict[str, Any]:
    return {"data_source": "s", "prompt": prompt, "reward_model": {"ground_truth": "7"}, "ability": "math", **columns}


INDEXED = [row(said(f"{number}" * (1 + number)), extra_info={"index": 100 - number}) for number in range(30)]
FILES = {
    "texts": [row(said("x", *TEXTS[:number], "y"), extra_info={"index": number}) for number in range(len(TEXTS))],
    "roles": [
        row(said("be short", "1+2?", roles=("system", "user")), extra_info={"index": 0}),
        row(said("1+2?", "3", "+1?"), extra_info={"index": 1}),
        row(said("1+2?", "3", "ok", roles=("user", "assistant", "tool")), extra_info={"index": 2}),
    ],
    "indexed": INDEXED,
    "no index": [row(said(str(number)), extra_info={"split": "train"}) for number in range(3)],
    "kwargs": [
        row(
            said("x"),
            extra_info={
                "index": 5,
                "need_tools_kwargs": True,
                "tools_kwargs": {"echo": {"create_kwargs": {"a": 1}}},
                "interaction_kwargs": {"name": "n"},
            },
        )
    ],
    "other columns": [row(said("x"), extra_info={"index": 1}, note="n")],
    "conversations": [
        row(said("be short", "1+2?", roles=("system", "user")), extra_info={"index": 0}),
        row(said(" 1+2? ", "<think>\n1\n</think>\n\n3", "+1?\n"), extra_info={"index": 1}),
        *(row(said("x", "y" * number, *TEXTS[1:6:2]), extra_info={"index": number}) for number in range(2, 60, 3)),
    ],
}


def conversation(draw: Random) -> list[dict[str, str]]:
    """One to nine messages of a user and an assistant in turns, a system before them or not, of odd texts."""
    texts = [draw.choice(TEXTS) * draw.randint(1, 3) + draw.choice(("", " ", "\n", "z")) for _ in range(9)]
    system = said(texts.pop(), roles=("system",)) if draw.random() < 0.4 else []
    return [*system, *said(*texts[: draw.choice((1, 3, 5, 7))])]


FILES["drawn"] = [row(conversation(Random(number)), extra_info={"index": number}) for number in range(60)]
CASES: dict[str, dict[str, Any]] = {
    **{name: {"file": name} for name in FILES if name != "no index"},
    **{f"{name}, as JSON lines": {"file": name, "kind": "jsonl"} for name in ("texts", "indexed", "kwargs")},
    "overlong dropped": {"file": "indexed", "config": {"filter_overlong_prompts": True, "max_prompt_length": 14}},
    "overlong dropped at the limit": {
        "file": "indexed",
        "config": {"filter_overlong_prompts": True, "max_prompt_length": 13},
    },
    "template kwargs": {"file": "indexed", "config": {"apply_chat_template_kwargs": {"extra": "!"}}},
    "overlong by template kwargs": {
        "file": "indexed",
        "config": {
            "apply_chat_template_kwargs": {"extra": "!!!!"},
            "filter_overlong_prompts": True,
            "max_prompt_length": 14,
        },
    },
    **{
        f"{count} samples, shuffle={shuffle}, seed={seed}": {
            "file": "indexed",
            "max_samples": count,
            "config": {"shuffle": shuffle, "seed": seed},
        }
        for count, shuffle, seed in (
            (7, True, 1),
            (7, True, 2),
            (7, False, 1),
            (29, True, 3),
            (30, True, 1),
            (99, True, 1),
        )
    },
    "few samples, then overlong dropped": {
        "file": "indexed",
        "max_samples": 12,
        "config": {"filter_overlong_prompts": True, "max_prompt_length": 14, "shuffle": True},
    },
    **{
        f"{name}, thinking={thinking}, at most {limit} tokens": {
            "file": "conversations",
            "family": name,
            "config": {
                "apply_chat_template_kwargs": {} if thinking else {"enable_thinking": False},
                "max_prompt_length": limit,
                "filter_overlong_prompts": limit < 999,
            },
        }
        for name in FAMILIES
        for thinking in (True, False)
        for limit in (999, 70, 110)
    },
    **{
        f"drawn, {name}, at most {limit} tokens": {
            "file": "drawn",
            "family": name,
            "config": {"max_prompt_length": limit, "filter_overlong_prompts": limit < 999},
        }
        for name in FAMILIES
        for limit in (999, 160)
    },
    "a prompt key": {
        "file": "indexed",
        "config": {"prompt_key": "question"},
    },
}


CUTS = [
    (side, length, limit) for side in ("left", "right", "middle") for length in range(1, 12) for limit in range(1, 9)
]
DIFFERENT: dict[str, dict[str, Any]] = {
    "`index` of rows without one": {"file": "no index"},
    "a data set of which no prompt is left": {
        "file": "indexed",
        "config": {"filter_overlong_prompts": True, "max_prompt_length": 2},
    },
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("rows")
    tokenizer = build_tokenizer(4096)
    tokenizer.chat_template = CHAT_TEMPLATE + "{{ extra or '' }}"
    tokenizer.save_pretrained(folder / "tokenizer")
    tokenizers = {"tokenizer": tokenizer, **{name: family.save(folder / name) for name, family in FAMILIES.items()}}
    cases = []
    whole = CASES | DIFFERENT
    for case in whole.values():
        config = {"max_prompt_length": 999, "seed": 1, "filter_overlong_prompts": False, **case.get("config", {})}
        key = config.setdefault("prompt_key", "prompt")
        rows = [{key if name == "prompt" else name: of for name, of in each.items()} for each in FILES[case["file"]]]
        file = folder / f"{len(cases)}.{case.get('kind', 'parquet')}"
        if file.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        else:
            file.write_text("".join(json.dumps(each) + "\n" for each in rows))
        of = folder / case.get("family", "tokenizer")
        most = case.get("max_samples", -1)
        cases.append({"tokenizer": str(of), "file": str(file), "config": config, "max_samples": most})
    verls = computed("read_rows.py", {"cases": cases, "cuts": CUTS}, VERL)
    items = {
        name: (verls["items"][number], ours(cases[number], tokenizers[Path(cases[number]["tokenizer"]).name]))
        for number, name in enumerate(whole)
    }
    return items | {"cut": verls["cuts"]}


@pytest.fixture(scope="module")
def cut(both: dict[str, Any]) -> Any:
    return both["cut"]


def ours(case: dict[str, Any], tokenizer: Any) -> Any:
    config = DataConfig(**case["config"], train_max_samples=case["max_samples"])
    try:
        dataset = RLHFDataset([Path(case["file"])], tokenizer, config)
    except ConfigError as exc:
        return {"error": str(exc)}
    items = [dataset[number] for number in range(len(dataset))]
    return [{name: item[name] for name in (*NAMES, "prompt_ids") if name in item} for item in items]


@pytest.mark.parametrize("name", CASES)
def test_rows_become_verls_prompts(both: dict[str, Any], name: str) -> None:
    verls, own = both[name]
    assert verls == own


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_prompts_are_cut_where_verl_cuts_them(cut: list[list[int]], side: str) -> None:
    """Not by its agent loops, which always cut on the left, but by what it has for this."""
    for (each, length, limit), theirs in zip(CUTS, cut, strict=True):
        if each == side:
            assert fit_prompt([*range(1, length + 1)], limit, side) == [token for token in theirs if token]


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_on_purpose_is_listed(both: dict[str, Any], name: str) -> None:
    verls, own = both[name]
    assert verls != own
    assert differences()[name]["why"]


@pytest.mark.parametrize("family", FAMILIES)
def test_cases_of_families_drop_some_prompts_and_keep_some(both: dict[str, Any], family: str) -> None:
    """Or they would show nothing of where the limit is."""
    whole, *cut = (both[f"{family}, thinking=True, at most {limit} tokens"][0] for limit in (999, 70, 110))
    assert 0 < min(map(len, cut)) < len(whole)
    assert 0 < len(both[f"drawn, {family}, at most 160 tokens"][0]) < len(FILES["drawn"])
