"""The request bodies that are on their way: how much they hold in all, and which of them gives way. Pure.

A client may begin as many bodies as it likes and end none of them. Beyond the bound the largest gives way, not the
newest: what a client with a small body sends always passes beside others who hoard.
"""

from typing import Protocol

UNFINISHED_BODY_BYTES = 256 << 20  # of all bodies together, where the settings do not say otherwise
# of one body: in frames of 16 KiB one of 16 MiB comes in 1,024, and no client cuts long ones into pieces of a few bytes
PIECES_OF_ANY_BODY = 2_048
BYTES_PER_FURTHER_PIECE = 1_024
_SIZES = 64  # by their number of bits


class Upload(Protocol):
    """A body that has not ended."""

    def give_way(self) -> None:
        """End it, with an answer for its client. It must have been released when this returns."""


class Uploads:
    """All bodies of a picker that have not ended."""

    def __init__(self, *, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self.received_bytes = 0  # of all bodies ever, as far as they did not end at once
        self.gave_way = 0
        self._sizes: dict[Upload, int] = {}
        self._alike: list[dict[Upload, None]] = [{} for _ in range(_SIZES)]  # in the order in which they grew so large

    def hold(self, upload: Upload, size: int) -> None:
        """Take note that a body has `size` bytes by now; others give way, or the body itself, if all are too many."""
        before = self._sizes.get(upload)
        self._sizes[upload] = size
        if before is None:
            self._alike[size.bit_length()][upload] = None
        elif before.bit_length() != size.bit_length():
            del self._alike[before.bit_length()][upload]
            self._alike[size.bit_length()][upload] = None
        self.held_bytes += size - (before or 0)
        self.received_bytes += size - (before or 0)
        while self.held_bytes > self.most_bytes:
            self.gave_way += 1
            self._largest().give_way()

    def release(self, upload: Upload) -> None:
        """Forget a body: it has ended, or is not wanted any more. Nothing happens where it is not held."""
        size = self._sizes.pop(upload, None)
        if size is not None:
            del self._alike[size.bit_length()][upload]
            self.held_bytes -= size

    def _largest(self) -> Upload:
        """Return one of the largest to within a factor of two, of those the one that has held so much longest."""
        return next(iter(next(alike for alike in reversed(self._alike) if alike)))
