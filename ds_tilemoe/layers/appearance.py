"""What refused experts look like: another look says whether they may be worth another examination.

It takes its time, as on DeepSpeed's own path there is some; :mod:`ds_tilemoe.layers.watch` looks at
experts that run on a backend.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from deepspeed.moe.sharded_moe import MOELayer
from torch import nn

from ds_tilemoe.layers.attributes import callees, class_places, hooks_of, is_bookkeeping, is_cached
from ds_tilemoe.layers.surroundings import hooks_around


def appearance(layer: MOELayer, ignored: Container[tuple[type, str]] | None) -> object:
    """What an examination may refuse and a user may take back: hooks, patches, classes, attributes,
    sizes, dtypes. It is compared by ``==``.

    Args:
        ignored: (class, name) of attributes that are no reason; None: no attribute is.
    """
    modules = _modules(layer)
    if not modules:
        return None
    looks = [
        (
            id(module),
            (kind := type(module)),
            callees(kind),
            hooks_of(module),
            "forward" in vars(module),
            [] if ignored is None else list(_values_of(module, ignored)),
        )
        for module in modules
    ]
    return hooks_around(layer.experts), looks, [_measures(p) for p in layer.parameters()]


def unread_properties(layer: MOELayer) -> set[tuple[type, str]]:
    """Cached properties that no module of the class has yet: reading one is no change."""
    modules = _modules(layer)
    kinds = set(map(type, modules))
    cached = {(k, n) for k in kinds for _, n in class_places(k) if is_cached(k, n)}
    return cached - {(type(module), name) for module in modules for name in vars(module)}


def _modules(layer: MOELayer) -> list[nn.Module]:
    experts = getattr(layer, "experts", None)
    return list(experts.modules()) if isinstance(experts, nn.Module) else []


def _values_of(module: nn.Module, ignored: Container[tuple[type, str]]) -> Iterator[object]:
    """Of all that its forward may read beside parameters."""
    kind = type(module)
    for name, value in [*vars(module).items(), *module._buffers.items()]:
        if not is_bookkeeping(name) and (kind, name) not in ignored:
            yield name, _value(value)
    for table, name in class_places(kind):
        if (kind, name) not in ignored:
            yield name, _value(table.get(name))


def _value(attribute: object) -> object:
    """Something that tells it from others by ``==``, which not every class answers in a word."""
    is_plain = isinstance(attribute, str | int | float | None)
    return attribute if is_plain else (type(attribute), id(attribute))


def _measures(parameter: torch.Tensor) -> object:
    try:
        return type(parameter), parameter.shape, parameter.dtype, parameter.device
    except Exception:  # a lazy one has no shape yet
        return type(parameter)
