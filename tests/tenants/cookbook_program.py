"""tinker-cookbook's supervised and RL loops, as they are."""

import asyncio
import json
import sys
from pathlib import Path

from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
from tinker_cookbook.rl import train as rl
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

url, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
renderer = {"model_name_for_tokenizer": model, "renderer_name": "role_colon"}
common = {"model_name": model, "recipe_name": "test", "renderer_name": "role_colon", "base_url": url, "lora_rank": 4}
with (folder / "chat.jsonl").open("w") as file:
    for number in range(24):
        messages = [{"role": "user", "content": f"{number}+1?"}, {"role": "assistant", "content": str(number + 1)}]
        file.write(json.dumps({"messages": messages}) + "\n")
chats = FromConversationFileBuilder(
    file_path=str(folder / "chat.jsonl"),
    test_size=4,
    common_config=ChatDatasetBuilderCommonConfig(**renderer, max_length=128, batch_size=5),
)
asyncio.run(
    supervised.main(
        supervised.Config(
            **common,
            log_path=str(folder / "supervised"),
            dataset_builder=chats,
            learning_rate=3e-3,
            num_epochs=2,
            save_every=2,
            eval_every=2,
        )
    )
)
sums = ArithmeticDatasetBuilder(**renderer, batch_size=2, n_batches=2, group_size=3)
asyncio.run(
    rl.main(
        rl.Config(
            **common,
            log_path=str(folder / "rl"),
            dataset_builder=sums,
            learning_rate=1e-3,
            max_tokens=4,
            save_every=1,
            eval_every=0,
        )
    )
)
