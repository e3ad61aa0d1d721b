"""The copy-engine mover's streams, events and page-locked memory on this rank, one set a heap.

What they do, and why no stream waits for ever: csrc/copy/copy_engine.h.
"""

from __future__ import annotations

import ctypes
import weakref

from ds_tilemoe.backends.cuda_functions import check
from ds_tilemoe.backends.cuda_heap import CudaHeap

# Two copies a peer are as fast where runs are as long as each other, and one or two are slower than
# SMs where they are not; short ones leave a copy engine below the link's rate: docs/gpu-notes.md.
MOST_COPIES = 4  # a peer
LEAST_BYTES = 8 << 20  # of a copy, where a peer gets more than one


class CopyEngine:
    """Makes it for a heap; waits for the device.

    Attributes:
        handle: for the params of the kernels' library.

    Raises:
        TileMoEError: the driver or the memory does not allow it.
    """

    def __init__(self, heap: CudaHeap) -> None:
        self._heap = weakref.ref(heap)  # whose memory goes before a new one's comes
        made, library = ctypes.c_void_p(), heap.library
        most_counts = heap.world * heap.needs.max_experts
        check(
            library.tilemoe_copy_engine_make(
                heap.view, most_counts, MOST_COPIES, LEAST_BYTES, ctypes.byref(made)
            ),
            "making the streams of mover copy_engine",
        )
        self.handle = made.value
        ended = weakref.finalize(self, library.tilemoe_copy_engine_free, made)
        ended.atexit = False  # the driver may have gone by then, and takes all with it

    def is_of(self, heap: CudaHeap) -> bool:
        """Whether it was made for this heap."""
        return self._heap() is heap
