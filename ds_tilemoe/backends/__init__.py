"""Backends: who moves the rows and runs the down projection."""

from __future__ import annotations

import weakref

import torch.distributed as dist

from ds_tilemoe.backends.cpu import CpuBackend
from ds_tilemoe.config import TileOverlapConfig

# One backend, so one heap, serves all layers of a group that share a config. Layers hold it; it
# goes when the last of them goes.
_backends: weakref.WeakValueDictionary[tuple[int, TileOverlapConfig], CpuBackend] = (
    weakref.WeakValueDictionary()
)


def backend_for(group: dist.ProcessGroup | None, config: TileOverlapConfig) -> CpuBackend:
    """The backend of ``group`` under ``config``; the same object for the same pair."""
    key = (id(group), config)
    backend = _backends.get(key)
    # A dead group's id may be in use again.
    if backend is None or backend.group is not group:
        backend = CpuBackend(group, config)
        _backends[key] = backend
    return backend


__all__ = ["CpuBackend", "backend_for"]
