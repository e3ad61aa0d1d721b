"""Exceptions of ds_tilemoe, one type per way to recover."""


class TileMoEError(RuntimeError):
    """Base of everything that this package raises on purpose."""


class ConfigError(TileMoEError, ValueError):
    """The ``tile_overlap`` block is wrong. Recover: fix the named key."""


class BuildError(TileMoEError):
    """An op could not be compiled or loaded. Recover: install what the message names."""


class UnsupportedLayerError(TileMoEError):
    """A layer cannot be swapped and ``strict`` forbids to leave it. Recover: see the reason."""


class CapacityError(TileMoEError):
    """A call needs more room than the heap has. Recover: raise the named setting, apply() again.

    The heap stays usable: every rank of the group raises this in the same call, and a later call
    that fits is right.
    """


class RankFailure(TileMoEError):
    """One rank failed before it could send rows; every rank of the group raises this.

    The heap stays usable: the failing rank told its peers in the count exchange.
    """


class DeadlineError(TileMoEError):
    """A wait passed its deadline, or a rank failed in mid-call. The heap is unusable from then on.

    Recover: a collective ``apply()`` makes a new heap.
    """


class PlanError(TileMoEError, ValueError):
    """A plan's input is wrong, or a plan does not hold what it must.

    Recover: fix the named value. From ``combine_plan.check()`` it means a fault of the planner.
    """
