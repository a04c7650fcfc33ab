"""Train a LoRA adapter with Tinker's client, and sample from each version: a server of `verl-sync serve` computes.

    verl-sync serve --model DIR
    python examples/adapters.py http://127.0.0.1:8000 DIR

The client is the package `tinker` of PyPI; it may be in an environment of its own.
"""

import sys

import tinker
from tinker import types

TEXTS = [f"{number}+{number}={2 * number}" for number in range(10, 20)]


def main(url: str, model: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-any")
    client = service.create_lora_training_client(base_model=model, rank=16, seed=0).result()
    tokenizer = client.get_tokenizer()
    data = []
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    for step in range(5):
        computed = client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        print(f"step {step}: loss {computed.result().metrics['loss:sum']:.3f}")
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(tokenizer.encode("12+12="))
    sampled = sampler.sample(prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=4, temperature=0.0))
    print(f"12+12={tokenizer.decode(sampled.result().sequences[0].tokens)}")
    print(client.save_state("state").result().path)
    service.close("success").result()


if __name__ == "__main__":
    main(*sys.argv[1:])
