"""The state of one stream's reports that decides what its next events mean."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from kv_indexer.apply.orphans import OrphanTable
from kv_indexer.apply.remembered_keys import RememberedKeys
from kv_indexer.apply.unplaced_blocks import UnplacedBlocks
from kvmesh.blocks.cache_groups import CacheGroup

KNOWN_KEYS_LIMIT = 65_536  # engine hashes remembered per stream; Redis has them all
FIRST_BLOCKS_LIMIT = 4096
_NO_KEYS = RememberedKeys()


@dataclass(slots=True, kw_only=True)
class StreamContext:
    """The state of one stream's reports that decides what its next events mean."""

    keys: RememberedKeys = field(default_factory=RememberedKeys)  # of blocks of `main_size` tokens
    main_size: int = 0  # 0 if not known yet
    # block size -> keys, of groups with other block sizes. Blocks of several sizes may share a hash: it stands for the
    # prompt up to the end of a block.
    apart: dict[int, RememberedKeys] = field(default_factory=dict)
    unplaced: UnplacedBlocks = field(default_factory=UnplacedBlocks)
    left_out: set[int] = field(default_factory=set)  # groups with blocks left out since full attention reported
    block_sizes: dict[str, int] = field(default_factory=dict)  # tier -> tokens a block
    groups: Mapping[int, CacheGroup] = field(default_factory=dict)
    orphans: OrphanTable = field(default_factory=OrphanTable)
    # prompts' first blocks held on the GPU: engine hash, with the group's number above it -> references, if we saw all
    first_blocks: dict[int, int] = field(default_factory=dict)
    # of a hybrid model: first block -> whether all groups held it, and the last group that stored it
    beginnings: dict[int, tuple[bool, int]] = field(default_factory=dict)
    is_exact: bool = True  # the index has everything that the publisher has
    mixes_sizes: bool = False  # the publisher was seen to change its block size without a restart
    reports_anew: bool = False  # it was seen to store a held beginning of a prompt again: kv_cache_report_mode=full
    more_is_report: bool = False  # whether the store whose first piece was planned last is a report

    def known(self, block_size: int) -> RememberedKeys:
        """Return the keys of blocks of this size, for reading."""
        return self.keys if self.main_size in (0, block_size) else self.apart.get(block_size, _NO_KEYS)

    def chain(self, block_size: int) -> RememberedKeys:
        """Return the keys of blocks of this size, for adding."""
        if block_size == self.main_size:
            return self.keys
        if not self.main_size:
            self.main_size = block_size
            return self.keys
        return self.apart.setdefault(block_size, RememberedKeys())

    def forget_oldest(self, *, known_keys: int = KNOWN_KEYS_LIMIT) -> None:
        """Evict the oldest entries beyond the limits."""
        self.keys.forget_oldest(known_keys)
        for keys in self.apart.values():
            keys.forget_oldest(known_keys)
        limit = min(FIRST_BLOCKS_LIMIT, known_keys)
        both: tuple[dict[int, Any], ...] = (self.first_blocks, self.beginnings)
        for entries in both:
            if len(entries) > limit:
                for engine_hash in list(islice(entries, len(entries) - limit * 3 // 4)):
                    del entries[engine_hash]
