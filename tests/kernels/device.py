"""A GPU that is not there: tensors without numbers, kernels that are listed instead of launched, copies that are seen.

Under `FakeTensorMode` tensors of device "cuda" have shapes and dtypes alone, so whatever reads one raises. `Device` adds
what that mode does not show: copies between host and device, the Triton kernels in the order of their launches, and the
memory that live tensors take.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction


class Device(TorchDispatchMode):
    """What a piece of code asks of the device: `copies` (operation, from, to), of which `waited` for what is queued;
    `launches`, `operations`, `peak` bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[str, str, str]] = []
        self.waited = 0
        self.launches: list[str] = []
        self.operations = 0
        self.peak = self.live = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        made = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        for source in given:
            for target in made:
                # A number wrapped as a tensor of no dimension is an argument of the kernel, not a copy.
                if source.device.type != target.device.type and (source.dim() or "copy" in function.__name__):
                    self.copies.append((function.__name__, source.device.type, target.device.type))
                    self.waited += not (kwargs or {}).get("non_blocking", False)
        for tensor in made:
            self._count(tensor)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages or tensor.device.type != "cuda":
            return
        self._storages.add(key)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self.live -= size


@contextlib.contextmanager
def fake_cuda(monkeypatch) -> Iterator[Device]:
    """Everything inside runs on fake CUDA tensors, seen by the `Device` that this yields."""
    device = Device()

    def launch(kernel: JITFunction, grid):
        def run(*args, **options):
            shapes = [x for x in args if isinstance(x, torch.Tensor)]
            assert all(x.device.type == "cuda" for x in shapes), f"{kernel.fn.__name__} was given a host tensor"
            device.launches.append(kernel.fn.__name__)

        return run

    monkeypatch.setattr(JITFunction, "__getitem__", launch)
    with FakeTensorMode(allow_non_fake_inputs=False), device:
        yield device
