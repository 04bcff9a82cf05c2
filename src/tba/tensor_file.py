"""Writes a safetensors file tensor by tensor, so that not all of them need be in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

KINDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}
"""What the format calls each type."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], whole: Callable[[Tensor], Tensor]) -> None:
    """Writes `tensors` by name. `whole` gives each in host memory, once, when its turn comes.

    Types of most bytes come first, so that each tensor begins at a multiple of its type's size; then the order is that
    of the names, the same for whoever has the same names.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, at = dict[str, object](), 0
    for name in names:
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(bytes_of(whole(tensors[name])))


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's numbers as they lie in memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
