# `make vision` appends this to torchvision's extension.py: operators that its compiled part would declare, were it
# built for this torch, and without which it is not imported. They compute nothing, and no model of ours calls them.
if not _has_ops():  # noqa: F821
    _DECLARED = torch.library.Library("torchvision", "DEF")  # noqa: F821
    _DECLARED.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _DECLARED.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
