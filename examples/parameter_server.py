"""A checkpoint in the memory of two ranks, pushed into their engines and then into that of one of them.

    torchrun --standalone --nproc-per-node 2 examples/parameter_server.py

The engines are toys: what matters is `receive`, which a real one would feed into its `load_weights`.
"""

import torch

from verl.checkpoint_engine.parameter_server import ParameterServer, receive

TIMEOUT_S = 60.0


def main() -> None:
    with ParameterServer(auto_pg=True, timeout_s=TIMEOUT_S) as server:
        mine = {f"layer{server.rank}.weight": torch.full((1000, 300), float(server.rank), dtype=torch.bfloat16)}
        engine: dict[str, torch.Tensor] = {}

        def request(socket_paths: list[tuple[str, str]]) -> None:
            """Ask this rank's engine to receive. With vLLM: a POST to its server, by one rank for all its workers."""
            path = dict(socket_paths)[server.device_id]
            for name, tensor in receive(path, "cpu", TIMEOUT_S):
                engine[name] = tensor.clone()

        server.register_checkpoint("step-1", named_tensors=mine)
        server.gather_metas("step-1")

        report = server.update("step-1", request)
        print(f"rank {server.rank}: {report.mode}, {len(engine)} tensors, {report.nbytes} bytes")

        engine.clear()
        report = server.update("step-1", request, ranks=[1])
        print(f"rank {server.rank}: {report.mode if report else 'nothing to do'}, {len(engine)} tensors")

        server.gather_metas("step-1")  # rank 0 waits here: rank 1 was reading its memory
        server.unregister_checkpoint("step-1")


if __name__ == "__main__":
    main()
