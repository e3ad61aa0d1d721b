"""Whether a layer's experts are still those that were examined: a look in every call.

Users replace, wrap, hook, patch, cast and load modules between two calls, and nothing tells us. So
a look asks whether

- the modules are the same, of the same classes, without hooks, and a call of them is what it was;
- what else their forwards may read is the same: attributes of the modules and of their classes;
- nothing has come that hides any of it: an instance's attribute in front of its class's;
- the matrices are as large as they were, of one dtype, and plain. They may lie elsewhere.

With 32 experts that is 130 modules and as many matrices, so a look goes over all of them with loops
of the interpreter's own (``map``), makes no object for any of them, and only compares. Where the
extension is loaded, its ``Glance`` (csrc/glance.h) is asked first whether anything is other
than at the last look, which takes a fifth of the time.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from itertools import chain, starmap
from operator import attrgetter, contains, getitem, is_, itemgetter
from typing import Any

from deepspeed.ops.op_builder.builder import OpBuilder
from torch import Tensor, nn

from ds_tilemoe.backends.base import Experts
from ds_tilemoe.layers.attributes import (
    HOOKS_OF_ALL,
    OF_EVERY_MODULE,
    Place,
    callees,
    class_places,
    is_bookkeeping,
    is_cached,
)
from ds_tilemoe.layers.experts import LocalExpert, is_linear
from ds_tilemoe.layers.recognise import UnknownExpert
from ds_tilemoe.op_builder import CPUTileMoEBuilder
from ds_tilemoe.router_rules import PLAIN

_CHILDREN, _PARAMETERS = itemgetter("_modules"), itemgetter("_parameters")
_PRE_HOOKS, _HOOKS = itemgetter("_forward_pre_hooks"), itemgetter("_forward_hooks")
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")
_TRAINING = itemgetter("training")
_DATA_PTR, _IS_CONTIGUOUS = Tensor.data_ptr, Tensor.is_contiguous

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
        written: (class, name) of attributes that are not looked at, as forwards write them.

    Attributes:
        holder: see above.
        experts: the cuts; their ``stamp`` is of the last look.
        weight: a matrix of theirs, at the last look.

    Raises:
        UnknownExpert: a look could never find them in order.
    """

    def __init__(
        self, holder: nn.Module, cuts: list[LocalExpert], written: Container[tuple[type, str]] = ()
    ) -> None:
        self.holder = holder
        self.experts = Experts(cuts)
        self._modules = [holder, *(module for cut in cuts for module in cut.expert.modules())]
        self._types = list(map(type, self._modules))
        # Of a module only its __dict__ is kept: whatever is in there may be replaced.
        self._tables = list(map(vars, self._modules))
        family = [vars(holder.deepspeed_experts), *self._tables]
        self._parents = [table for table in family if table["_modules"]]
        self._children = self._list_children()
        linears = dict.fromkeys(module for module in self._modules if is_linear(module))
        linears.update(dict.fromkeys(linear for cut in cuts for linear in cut.linears))
        self._linears = list(map(vars, linears))
        places = {
            kind: [place for place in class_places(kind) if (kind, place[1]) not in written]
            for kind in dict.fromkeys(self._types)
        }
        self._classes = list(places)
        self._callees = list(map(callees, self._classes))
        self._class_attributes = list(chain.from_iterable(places.values()))
        self._class_values = list(starmap(getitem, self._class_attributes))
        self._attributes = [place for cut in cuts for place in _attributes_of(cut, written)]
        # Places that have to stay vacant: what came there would hide an attribute of the class,
        # what a call goes through, or a parameter.
        hideable = {
            kind: {name for _, name in found if not is_cached(kind, name)}
            for kind, found in places.items()
        }
        self._vacant: list[Place] = [
            (table, name)
            for kind, table in zip(self._types, self._tables, strict=True)
            for name in hideable[kind] - table.keys()
        ]
        self._may_hide = {id(table): table for table, _ in self._vacant}
        self._vacant += [(table, n) for table in self._tables for n in ("forward", "_call_impl")]
        for table in self._linears:
            self._vacant.append((table, "weight"))
            # By None a class may say that it has no bias.
            says_none = "bias" in table and table["bias"] is None
            places_of_bias = self._attributes if says_none else self._vacant
            places_of_bias.append((table, "bias"))
        self._values = list(starmap(getitem, self._attributes))
        self._parameters: list[Tensor | None] = []  # of the linears
        self._tensors: list[Tensor] = []  # those that are not None
        self._weights: list[Tensor] = []  # the matrices among them
        self._shapes: list[Any] = []  # of the matrices, as they were examined
        self._seen: tuple[list[Any], ...] = ()  # of the tensors, at the last look
        self._with_dropout = [c for c in cuts if c.dropouts or c.recipe.random_in_training]
        self._may_drop = [vars(m) for c in self._with_dropout for m in (c.expert, *c.dropouts)]
        self._glance: Any = None  # of the last look, if the extension is there
        self._loose: list[Place] = []  # attributes that it does not miss
        self._has_no_glance = False  # the extension has failed
        self.weight: Tensor
        if not self.look():
            raise UnknownExpert("its experts have hooks, patches or parts that are not plain")

    def look(self) -> bool:
        """Whether the experts are as they were examined; their numbers and dtype may be others."""
        try:
            glance = self._glance
            if glance is not None and glance.holds() and all(starmap(contains, self._loose)):
                return not any(HOOKS_OF_ALL) and self._has_its_classes()
            is_in_order = self._is_whole() and self._see_operands()
        except Exception:  # a part that was there is gone
            is_in_order = False
        self._glance = self._make_glance() if is_in_order else None
        return is_in_order

    @property
    def is_random(self) -> bool:
        """Whether the forward of an expert would now drop at random."""
        return any(map(_TRAINING, self._may_drop)) and any(c.is_random for c in self._with_dropout)

    @property
    def may_be_random(self) -> bool:
        """Whether it would be, in training mode."""
        return any(cut.may_be_random for cut in self._with_dropout)

    def _make_glance(self) -> Any:
        extension = _extension()
        if extension is None or self._has_no_glance:
            return None
        # To a glance a table of as many names is the same. But one that it does not look at may
        # have gone, and another have come that hides something of the class.
        known = {(id(table), name) for table, name in self._attributes}
        self._loose = [
            (table, name)
            for key, table in self._may_hide.items()
            for name in table.keys() - OF_EVERY_MODULE
            if (key, name) not in known
        ]
        try:
            return extension.Glance(
                modules=self._modules,
                tables=self._tables,
                parents=self._parents,
                linears=self._linears,
                attributes=self._attributes,
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

    def _is_whole(self) -> bool:
        """Nothing was replaced, hooked, patched or given another class (as parametrising does)."""
        return not (
            any(HOOKS_OF_ALL)
            or list(map(type, self._modules)) != self._types
            or self._list_children() != self._children
            or any(map(_HOOKS, self._tables))
            or any(map(_PRE_HOOKS, self._tables))
            or list(starmap(getitem, self._attributes)) != self._values
            or not self._has_its_classes()
            or self._hides_its_class()
        )

    def _has_its_classes(self) -> bool:
        return (
            list(map(callees, self._classes)) == self._callees
            and list(starmap(getitem, self._class_attributes)) == self._class_values
        )

    def _hides_its_class(self) -> bool:
        return any(starmap(contains, self._vacant))

    def _list_children(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, map(_CHILDREN, self._parents))))

    def _see_operands(self) -> bool:
        """Stamps the experts anew if a matrix has moved; false if they differ in dtype, or
        one is of another size than it was."""
        parameters = list(chain.from_iterable(map(dict.values, map(_PARAMETERS, self._linears))))
        are_same = map(is_, parameters, self._parameters)
        if len(parameters) != len(self._parameters) or not all(are_same):
            # May raise, and is then to raise again.
            self._weights = [table["_parameters"]["weight"] for table in self._linears]
            self._tensors = [tensor for tensor in parameters if tensor is not None]
            self._parameters, self._seen = parameters, ()
        # Memory that was given back may come again with another dtype, other sizes or strides, and
        # torch.utils.swap_tensors gives an object another class.
        seen = (
            list(map(type, self._tensors)),
            list(map(_DATA_PTR, self._tensors)),
            list(map(_DTYPE, self._tensors)),
            list(map(_IS_CONTIGUOUS, self._tensors)),
            list(map(_SHAPE, self._tensors)),
        )
        if seen == self._seen:
            return True
        classes, _, dtypes, *_ = seen
        if not all(map(PLAIN.__contains__, classes)):
            return False
        if len(set(dtypes)) > 1 or not self._has_its_sizes():
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


def _attributes_of(cut: LocalExpert, written: Container[tuple[type, str]]) -> Iterator[Place]:
    """What an expert's forward may read beside its tensors, whose numbers the recipe does not stand
    on: factors, words, flags, functions; and places that hold nothing yet.

    Not of linears and dropouts, which are looked at by themselves.
    """
    for module in cut.expert.modules():
        if type(module) is nn.Linear or module in cut.dropouts:
            continue
        kind = type(module)
        for name in vars(module):
            if not is_bookkeeping(name) and (kind, name) not in written:
                yield vars(module), name
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is None and not is_linear(module) and (kind, name) not in written:
                    yield table, name
