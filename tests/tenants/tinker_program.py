"""What somebody writes with the client of PyPI: trains, saves, samples, goes on, and is refused. Prints JSON."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import tinker
from tinker import types

url, name, steps_file, example = sys.argv[1:]
steps = json.loads(Path(steps_file).read_text())
prompt = types.ModelInput.from_ints([5, 17, 3, 40])


def datum(tokens, inputs):
    arrays = {
        key: np.array(values, dtype=np.int64 if key == "target_tokens" else np.float32)
        for key, values in inputs.items()
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=arrays)


def refused(call):
    try:
        call().result()
    except Exception as exc:  # noqa: BLE001 - whatever a user would see
        return f"{type(exc).__name__}: {exc}"
    raise AssertionError("it was not refused")


runpy.run_path(example)["main"](url, name)
service = tinker.ServiceClient(base_url=url, api_key="tml-any")
adam = types.AdamParams(learning_rate=5e-3, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0)
client = service.create_lora_training_client(base_model=name, rank=4, seed=11).result()
told = {"capabilities": service.get_server_capabilities().supported_models[0].model_name, "losses": [], "logprobs": []}
told["rank"] = client.get_info().lora_rank
told["tokens"] = client.get_tokenizer().encode("12+7")
for data in steps:
    sent = client.forward_backward([datum(*each) for each in data], "cross_entropy")
    stepped = client.optim_step(adam)
    told["losses"].append(sent.result().metrics["loss:sum"])
    told["logprobs"] += [each["logprobs"].tolist() for each in sent.result().loss_fn_outputs]
    assert stepped.result().metrics["grad_norm"] > 0
told["state"] = client.save_state("state").result().path
told["sampler"] = client.save_weights_for_sampler("sampler").result().path
sampler = client.save_weights_and_get_sampling_client().result()
params = types.SamplingParams(max_tokens=5, temperature=0.7, seed=3, stop=[])
data = [datum(*each) for each in steps[0]]
custom = client.forward_backward_custom(
    data, lambda _, logprobs: (-sum(each.sum() for each in logprobs), {"mine": 2.0})
)
told["custom"] = custom.result().metrics
client.optim_step(adam).result()
for each in (sampler, service.create_sampling_client(model_path=told["sampler"]).result()):
    found = each.sample(prompt, num_samples=2, sampling_params=params, include_prompt_logprobs=True).result()
    told.setdefault("samples", []).append([[one.tokens, one.logprobs] for one in found.sequences])
    told.setdefault("prompts", []).append([found.prompt_logprobs, each.compute_logprobs(prompt).result()])
restored = service.create_training_client_from_state_with_optimizer(told["state"]).result()
told["restored"] = [each.forward(data, "cross_entropy").result().metrics for each in (restored, client)]
restored.load_state(told["state"]).result()
told["refused"] = [
    refused(lambda: service.create_lora_training_client(base_model="other/model")),
    refused(lambda: service.create_lora_training_client(base_model=name, rank=1000)),
    refused(lambda: client.forward_backward(data, "dro")),
    refused(lambda: client.optim_step(adam)),
    refused(lambda: service.create_sampling_client(model_path="tinker://none/weights/x")),
]
rest = service.create_rest_client()
told["listed"] = [each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints]
rest.delete_checkpoint_from_tinker_path(told["state"]).result()
run = told["state"].removeprefix("tinker://").partition("/")[0]
told["left"] = [each.tinker_path for each in rest.list_checkpoints(run).result().checkpoints]
service.close("success").result()
print(json.dumps(told))
