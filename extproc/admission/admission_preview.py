"""What would become of a request that came now: made by `admit_request` for explanations. A value."""

from collections.abc import Mapping

import msgspec

from extproc.admission.saturation import Room


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """What would become of a request that came now; for explanations."""

    verdict: str  # "go", "wait" or "refuse"
    rooms: Mapping[str, Room]  # by endpoint
    expected_ttft_seconds: float
    waiting_requests: int  # of the same or a higher priority, in the queue
