"""What a ParameterServer and an engine on one host call the device that they share."""

from __future__ import annotations

from typing import Any

import torch


def device_id(device: torch.device, rank: int) -> str:
    """The same in every process of the host for an accelerator; on CPU, which has no devices, `cpu-<rank>`.

    Processes number the accelerators that they can see, each in its own way; torch knows the hardware's own id.
    """
    if device.type == "cpu":
        return f"cpu-{rank}"
    index = device.index or 0
    properties: Any = getattr(torch, device.type).get_device_properties(index)
    uuid = getattr(properties, "uuid", None)  # older torch_npu has none: then all processes have to see all devices
    return f"{device.type}-{uuid if uuid is not None else index}"
