"""What the C library's allocator gives back to the system, and when Python's garbage collector rests."""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of <malloc.h>
LARGE_BYTES = 1 << 20


def return_large_blocks(*, from_bytes: int = LARGE_BYTES) -> None:
    """Have each block of so many bytes and more given back when it is freed; call it once, at the start of a process.

    glibc raises that limit by itself to the largest block that was freed, up to 32 MiB, and then keeps twice as much
    in each of its heaps: one long message of a stranger would cost the process that for good. Other C libraries have no
    such call, and nothing happens.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, from_bytes)


def return_free_pages() -> None:
    """Give every free page of the heap back, also between blocks that are in use. Takes milliseconds; for a thread."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Have no garbage looked for while modules are loaded: next to nothing of them is, and it takes an eighth of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
