import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.utils.model import load_tokenizer
from verl.workers.config import HFModelConfig


@pytest.fixture(scope="session")
def tokenizer(tiny_model_dir):
    return load_tokenizer(HFModelConfig(path=str(tiny_model_dir)))


@pytest.fixture
def write(tmp_path):
    """Writes a parquet file with one row per question; `columns` replaces columns, None removes one."""

    def write_file(questions, name="data.parquet", **columns):
        rows = {
            "data_source": ["test/source"] * len(questions),
            "prompt": [[{"role": "user", "content": question}] for question in questions],
            "reward_model": [{"style": "rule", "ground_truth": question} for question in questions],
            "extra_info": [{"split": "train", "index": 100 + row} for row in range(len(questions))],
        } | columns
        path = tmp_path / name
        pq.write_table(pa.table({key: values for key, values in rows.items() if values is not None}), path)
        return path

    return write_file
