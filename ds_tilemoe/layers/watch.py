"""Whether a layer's experts are still those that were examined: a look in every call.

Users replace, wrap, hook, patch, cast and load modules between two calls, and nothing tells us.
With 32 experts that is 130 modules and as many matrices, so a look goes over all of them with loops
of the interpreter's own (``map``), makes no object for any of them, and only compares. Where the
extension is loaded, its ``Glance`` (csrc/glance.h) is asked first whether anything is other
than at the last look, which takes a fifth of the time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from types import MappingProxyType
from typing import Any

from deepspeed.ops.op_builder.builder import OpBuilder
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ds_tilemoe.backends.base import Experts
from ds_tilemoe.layers.experts import (
    OF_EVERY_MODULE,
    LocalExpert,
    Written,
    calling,
    class_attributes,
    is_cached,
    is_linear,
    is_own,
)
from ds_tilemoe.layers.recognise import UnknownExpert
from ds_tilemoe.op_builder import CPUTileMoEBuilder

_CHILDREN, _PARAMETERS = itemgetter("_modules"), itemgetter("_parameters")
_PRE_HOOKS, _HOOKS = itemgetter("_forward_pre_hooks"), itemgetter("_forward_hooks")
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")
_TRAINING = itemgetter("training")
_GET = MappingProxyType.get  # of a class's __dict__, past what a lookup in it would make
_DATA_PTR, _IS_CONTIGUOUS = Tensor.data_ptr, Tensor.is_contiguous
_ABSENT = object()
# Hooks of all modules of the process.
_HOOKS_OF_ALL = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)

logger = logging.getLogger("ds_tilemoe")
_faults: set[str] = set()  # of the extension, that were warned of


def _extension() -> Any:
    """The module of csrc/bindings.cpp; None where this process has not loaded it."""
    return OpBuilder._loaded_ops.get(CPUTileMoEBuilder.NAME)


class ExpertWatch:
    """Looks at the experts of one layer.

    Args:
        holder: DeepSpeed's ``Experts`` module.
        cuts: its experts, examined: no hooks, no patches, one dtype, one recipe.
        written: what of their attributes is not looked at, as their forwards write it.

    Attributes:
        holder: see above.
        experts: the cuts; their ``stamp`` is of the last look.
        weight: a matrix of theirs, at the last look.

    Raises:
        UnknownExpert: a look could never find them in order.
    """

    def __init__(
        self, holder: nn.Module, cuts: Sequence[LocalExpert], written: Written | None = None
    ) -> None:
        written = Written() if written is None else written
        self.holder = holder
        self.experts = Experts(cuts)
        self._cuts = cuts
        self._modules = [holder, *(module for cut in cuts for module in cut.expert.modules())]
        self._types = list(map(type, self._modules))
        # Of a module only its __dict__ is kept: whatever is in there may be replaced.
        self._tables = list(map(vars, self._modules))
        family = [vars(holder.deepspeed_experts), *self._tables]
        self._parents = [table for table in family if table["_modules"]]
        self._children = self._list_children()
        self._classes = list(dict.fromkeys(self._types))
        self._forwards = list(map(calling, self._classes))
        of_classes = {
            kind: [pair for pair in class_attributes(kind) if (kind, pair[1]) not in written]
            for kind in self._classes
        }
        self._class_tables = [table for pairs in of_classes.values() for table, _ in pairs]
        self._class_names = [name for pairs in of_classes.values() for _, name in pairs]
        self._class_values = self._list_class_values()
        linears = dict.fromkeys(module for module in self._modules if is_linear(module))
        linears.update(dict.fromkeys(linear for cut in cuts for linear in cut.linears))
        self._linears = list(map(vars, linears))
        self._plain_biases = self._list_plain_biases()
        self._parameters: list[Tensor | None] = []  # of the linears
        self._tensors: list[Tensor] = []  # of these, and the matrices among them
        self._weights: list[Tensor] = []
        self._shapes: list[Any] = []  # of the matrices, as they were examined
        self._seen: tuple[list[Any], ...] = ()
        self._with_dropout = [c for c in cuts if c.dropouts or c.recipe.random_in_training]
        self._may_drop = [
            vars(module) for c in self._with_dropout for module in (c.expert, *c.dropouts)
        ]
        attributes = [pair for cut in cuts for pair in _attributes_of(cut, written)]
        self._owners = [table for table, _ in attributes]
        self._names = [name for _, name in attributes]
        self._values = [table[name] for table, name in attributes]
        # What a module may yet put in front of its class: an attribute, or a method.
        may_hide = {
            kind: {name for _, name in pairs if not is_cached(kind, name)}
            for kind, pairs in of_classes.items()
        }
        free = [
            (table, name)
            for kind, table in zip(self._types, self._tables, strict=True)
            for name in may_hide[kind]
            if name not in table
        ]
        self._free_tables, self._free_names = [t for t, _ in free], [name for _, name in free]
        # By id, of the tables of these: the names in it that a glance will not miss.
        self._held = {id(table): (table, set(OF_EVERY_MODULE)) for table in self._free_tables}
        for table, name in attributes:
            if id(table) in self._held:
                self._held[id(table)][1].add(name)
        self._loose_tables: list[dict[str, Any]] = []  # the other names in them, at a glance
        self._loose_names: list[str] = []
        self._glance: Any = None  # of the last look, if the extension is there
        self._has_no_glance = False  # the extension has failed
        self.weight: Tensor
        has_plain = any(bias is not None and bias is not _ABSENT for bias in self._plain_biases)
        if has_plain or not self.look():
            raise UnknownExpert("its experts have hooks, patches or parts that are not plain")

    def look(self) -> bool:
        """Whether the experts are as they were examined; their numbers and dtype may be others."""
        try:
            if self._glance is not None and self._glance.holds() and not self._has_lost_names():
                return not any(_HOOKS_OF_ALL) and self._has_its_classes()
            is_in_order = self._is_whole() and self._see_operands()
        except Exception:  # a part that was there is gone
            is_in_order = False
        self._glance = self._make_glance() if is_in_order else None
        return is_in_order

    def _make_glance(self) -> Any:
        extension = _extension()
        if extension is None or self._has_no_glance:
            return None
        loose = [
            (table, name) for table, held in self._held.values() for name in table.keys() - held
        ]
        self._loose_tables, self._loose_names = [t for t, _ in loose], [name for _, name in loose]
        try:
            return extension.Glance(
                modules=self._modules,
                tables=self._tables,
                parents=self._parents,
                linears=self._linears,
                attributes=list(zip(self._owners, self._names, strict=True)),
            )
        except Exception as error:  # its fault and not the experts'
            self._has_no_glance = True
            text = f"{type(error).__name__}: {error}"
            if text not in _faults:
                _faults.add(text)
                logger.warning(
                    "looking at the experts in each forward takes longer: the extension failed"
                    " (%s); fix: install ds_tilemoe again",
                    text,
                )
            return None

    @property
    def is_random(self) -> bool:
        """Whether the forward of an expert would now drop at random."""
        return any(map(_TRAINING, self._may_drop)) and any(
            cut.is_random for cut in self._with_dropout
        )

    @property
    def may_be_random(self) -> bool:
        """Whether it would be, in training mode."""
        return any(cut.may_be_random for cut in self._cuts)

    def _is_whole(self) -> bool:
        """Nothing was replaced, hooked, patched or given another class (as parametrising does)."""
        tables = self._tables
        return not (
            any(_HOOKS_OF_ALL)
            or list(map(type, self._modules)) != self._types
            or self._list_children() != self._children
            or any(map(_HOOKS, tables))
            or any(map(_PRE_HOOKS, tables))
            or any(map(contains, tables, repeat("forward")))
            or any(map(contains, tables, repeat("_call_impl")))
            or any(map(contains, self._linears, repeat("weight")))
            or not all(map(is_, self._list_plain_biases(), self._plain_biases))
            or list(map(dict.get, self._owners, self._names, repeat(_ABSENT))) != self._values
            or not self._has_its_classes()
            or self._hides_its_class()
        )

    def _has_its_classes(self) -> bool:
        return list(map(calling, self._classes)) == self._forwards and (
            not self._class_names or self._list_class_values() == self._class_values
        )

    def _list_class_values(self) -> list[Any]:
        return list(map(_GET, self._class_tables, self._class_names, repeat(_ABSENT)))

    def _hides_its_class(self) -> bool:
        return any(map(contains, self._free_tables, self._free_names))

    def _has_lost_names(self) -> bool:
        """Since the glance. To it a table of as many names is the same; but for this one may have
        gone, and another have come that hides something of the class."""
        return not all(map(contains, self._loose_tables, self._loose_names))

    def _list_plain_biases(self) -> list[Any]:
        """Of the linears: what hides a parameter; None is how a class may say that it has none."""
        return list(map(dict.get, self._linears, repeat("bias"), repeat(_ABSENT)))

    def _list_children(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, map(_CHILDREN, self._parents))))

    def _see_operands(self) -> bool:
        """Stamps the experts anew if a matrix has moved; false if they differ in dtype, or
        one is of another size than it was."""
        parameters = list(chain.from_iterable(map(dict.values, map(_PARAMETERS, self._linears))))
        if len(parameters) != len(self._parameters) or not all(
            map(is_, parameters, self._parameters)
        ):
            # May raise, and is then to raise again.
            self._weights = [table["_parameters"]["weight"] for table in self._linears]
            self._tensors = [tensor for tensor in parameters if tensor is not None]
            self._parameters, self._seen = parameters, ()
        # Memory that was given back may come again with another dtype, other sizes or strides.
        seen = (
            list(map(_DATA_PTR, self._tensors)),
            list(map(_DTYPE, self._tensors)),
            list(map(_IS_CONTIGUOUS, self._tensors)),
            list(map(_SHAPE, self._tensors)),
        )
        if seen == self._seen:
            return True
        if len(set(seen[1])) > 1 or not self._has_its_sizes():
            return False
        self._seen, self.weight = seen, self._weights[0]
        self.experts.stamp = object()
        return True

    def _has_its_sizes(self) -> bool:
        """Kernels read by the sizes of the matrices as examined, and a bias by those as well."""
        shapes = list(map(_SHAPE, self._weights))
        self._shapes = self._shapes or shapes
        biases = (table["_parameters"].get("bias") for table in self._linears)
        return shapes == self._shapes and all(
            bias is None or bias.shape == shape[:1]
            for bias, shape in zip(biases, shapes, strict=True)
        )


def _attributes_of(cut: LocalExpert, written: Written) -> Iterator[tuple[dict[str, Any], str]]:
    """Tables and keys of what an expert's forward may read beside its tensors, whose numbers the
    recipe does not stand on: factors, words, flags, functions; and places that hold nothing yet.

    Not of linears and dropouts, which are looked at by themselves.
    """
    for module in cut.expert.modules():
        if type(module) is nn.Linear or module in cut.dropouts:
            continue
        kind = type(module)
        for name in vars(module):
            if is_own(name) and (kind, name) not in written:
                yield vars(module), name
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is None and not is_linear(module) and (kind, name) not in written:
                    yield table, name
