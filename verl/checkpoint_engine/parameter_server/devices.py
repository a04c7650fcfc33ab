"""The name by which a ParameterServer and an engine on one host identify a shared device."""

from __future__ import annotations

from typing import Any

import torch


def device_id(device: torch.device, rank: int) -> str:
    """The hardware id of an accelerator, the same in every process of the host; on CPU `cpu-<rank>`.

    Device indices differ between processes, because each numbers the accelerators that it can see.
    """
    if device.type == "cpu":
        return f"cpu-{rank}"
    index = device.index or 0
    properties: Any = getattr(torch, device.type).get_device_properties(index)
    uuid = getattr(properties, "uuid", None)  # older torch_npu has none: then all processes have to see all devices
    return f"{device.type}-{uuid if uuid is not None else index}"
