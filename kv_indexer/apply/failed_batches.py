"""Which batches could not be applied when they were last tried: the same replay brings them again, and again. Pure."""

from collections.abc import Collection, Sequence

from kv_indexer.apply.batches import Batch


class FailedBatches:
    """One stream's."""

    def __init__(self) -> None:
        self._failed: dict[int, int] = {}  # number -> checksum of its payload

    @property
    def numbers(self) -> Collection[int]:
        """Those that are to be applied one by one, to see which it is."""
        return self._failed.keys()

    def is_poison(self, portion: Sequence[Batch]) -> bool:
        """Take note of a portion that has failed; tell whether it is one batch that did so before."""
        first = portion[0]
        if len(portion) == 1 and self._failed.pop(first.frame.seq, None) == first.crc:
            return True
        self._failed = {batch.frame.seq: batch.crc for batch in portion}
        return False

    def forgive(self, portion: Sequence[Batch]) -> None:
        """Take note of a portion that has come through."""
        for batch in portion if self._failed else ():
            self._failed.pop(batch.frame.seq, None)
