"""Controls when the C library returns memory to the system, and when Python's garbage collector rests."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of <malloc.h>
LARGE_BYTES = 1 << 20


def return_large_blocks(*, from_bytes: int = LARGE_BYTES) -> None:
    """Return each freed block of `from_bytes` or more to the system; call it once, at the start of a process.

    glibc raises this limit automatically to the largest freed block, up to 32 MiB, and then keeps twice as much in each
    of its heaps: a single long message of a stranger would cost the process that for good. Other C libraries have no
    such call, and nothing happens.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, from_bytes)


def return_free_pages() -> None:
    """Return every free page of the heap, even between blocks in use. Takes milliseconds, so run it in a thread."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Switch the garbage collector off while modules are loaded: it finds next to nothing in an eighth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
