"""An extension of vLLM's workers, with which `/collective_rpc` makes them load from a ParameterServer."""

from __future__ import annotations

from typing import Any

from vllm.config import WeightTransferConfig, set_current_vllm_config

from ...compat.vllm_0_24 import makes_engines_of_less
from ...parameter_server.endpoints import ENGINE_NAME
from .receiver import ArenaEngineOfLess, ArenaUpdateInfo, ArenaWeightTransferEngine


class VllmColocateWorkerExtension:
    """A `--worker-extension-cls` of vLLM, named as in checkpoint-engine; it needs no `--weight-transfer-config`."""

    def update_weights_from_ipc(self: Any, zmq_handles: dict[str, str]) -> None:
        """Load every weight that a ParameterServer sends. Called on all workers, by `request_inference_to_update`.

        `zmq_handles`: the socket paths that `req_func` gets, by device id. vLLM runs no step meanwhile. Requests in
        flight go on with the new weights, and the prefix cache keeps what the old ones computed: reset it.

        Raises what `ArenaWeightTransferEngine.receive_weights` raises.
        """
        if not isinstance(engine := getattr(self, "weight_transfer_engine", None), ArenaWeightTransferEngine):
            engine = self.weight_transfer_engine = _engine_of(self)
        with set_current_vllm_config(self.vllm_config):
            engine.receive_weights(ArenaUpdateInfo(socket_paths=zmq_handles))


def _engine_of(worker: Any) -> ArenaWeightTransferEngine:
    config, model = WeightTransferConfig(backend=ENGINE_NAME), worker.model_runner.get_model()
    with set_current_vllm_config(worker.vllm_config):
        if makes_engines_of_less():
            return ArenaEngineOfLess(config, worker.vllm_config.parallel_config, model)
        return ArenaWeightTransferEngine(config, worker.vllm_config, worker.device, model)
