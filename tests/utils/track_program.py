"""Logs a run that is killed after step 3 and resumed after step 2, with the real package of a service, offline.

    python track_program.py SERVICE DIRECTORY first|resumed|read

`read` prints what the service's own reader finds, as a line of JSON: `runs`, the ids; `points`, [name, step, value];
`samples`, texts that show them.
"""

from __future__ import annotations

import json
import math
import sqlite3
import sys
from pathlib import Path

CONFIG = {"actor": {"lr": 1e-6}, "data": {"files": ["a", "b"]}, "empty": "", "none": None}
NAME = "val-core//data/math (v2)/acc/mean@4"


def log(service: str, directory: Path, resume_step: int, steps: tuple[int, ...]) -> None:
    from verl.utils.tracking import Tracking
    from verl.utils.tracking_services import Sample

    config = CONFIG | {"total_steps": resume_step}  # which may be another one when a run is resumed
    with Tracking("project", "experiment", [service], directory, config, resume_step=resume_step) as tracking:
        for step in steps:
            tracking.log_samples([Sample("one?", f"answer {step}", 0.5), Sample("two?", "no", 0.0)], step)
            tracking.log({"critic/score/mean": step / 4, NAME: 1.0, "actor/grad_norm": math.nan}, step)


def read_wandb(directory):
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto import wandb_internal_pb2

    runs, points = set(), []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        reader = WBDataStoreReader()
        reader.open(path)
        while (data := reader.scan()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                runs.add(record.run.run_id)
            for item in record.history.item:
                name, value = item.key or "/".join(item.nested_key), json.loads(item.value_json)
                if isinstance(value, (int, float)) and not name.startswith("_"):
                    points.append([name, record.history.step.num, value])
    samples = [path.read_text() for path in sorted(directory.rglob("*.table.json"))]
    return runs, points, samples


def read_swanlab(directory):
    from swanlab.proto.swanlab.record.v1 import record_pb2
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    runs, points = set(), []
    for path in sorted(directory.glob("swanlab/run-*/*.swanlab")):
        runs.add(path.stem.removeprefix("run-"))
        reader = DataStoreReader()
        reader.open(path)
        for data in reader:
            record = record_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("scalar"):
                points.append([record.scalar.key, record.scalar.step, record.scalar.value.number])
    return runs, points, [path.read_text() for path in sorted(directory.rglob("media/**/*.json"))]


def read_mlflow(directory):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{directory / 'mlflow.db'}")
    (experiment,) = (each for each in client.search_experiments() if each.name == "project")
    runs, points = set(), []
    for run in client.search_runs([experiment.experiment_id]):
        assert run.data.params["actor.lr"] == "1e-06"
        runs.add(run.info.run_id)
        for name in run.data.metrics:
            points += [[name, each.step, each.value] for each in client.get_metric_history(run.info.run_id, name)]
    samples = [path.read_text() for path in sorted(directory.rglob("val_step*.json"))]
    return runs, points, samples


def read_trackio(directory):
    (path,) = directory.rglob("project.db")
    with sqlite3.connect(path) as connection:
        rows = connection.execute("select run_id, step, metrics from metrics").fetchall()
        samples = [str(messages) for (messages,) in connection.execute("select messages from traces")]
    points = [[name, step, value] for _, step, text in rows for name, value in json.loads(text).items()]
    return {run for run, *_ in rows}, points, samples


def read_clearml(directory):
    runs, points, samples = set(), [], []
    for path in sorted(directory.rglob("metrics.jsonl")):
        for line in path.read_text().splitlines():
            for event in json.loads(line):
                runs.add(event["task"])
                if event["type"] == "training_stats_scalar":
                    points.append([f"{event['metric']}/{event['variant']}", event["iter"], event["value"]])
                else:
                    samples.append(json.dumps(event))
    return runs, points, samples


if __name__ == "__main__":
    chosen, folder, what = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if what == "read":
        ids, numbers, shown = globals()[f"read_{chosen}"](folder)
        print(json.dumps({"runs": sorted(ids), "points": numbers, "samples": shown}))
    else:
        log(chosen, folder, *((0, (1, 2, 3)) if what == "first" else (2, (3, 4))))
