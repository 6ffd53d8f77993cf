"""How fast the directory goes about its work, and how long it waits."""

import msgspec


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, amounts in entries or changes.

    A member tells every `beat_s` that it lives, and is forgotten when `expiry_s` of news went by without any of its
    own. Changes are gathered for `gather_s`, and at most `batch_entries` go into one announcement; `unsent_entries`
    may wait for a board that does not answer. Who hears nothing at all for `silence_s` subscribes anew. A record is
    read again `resync_s` after it was read last, at the earliest. What failed is tried again after `retry_s`, then
    twice that, up to `retry_most_s`. `record_s` is how long Redis keeps the record of a member that is gone, `start_s`
    how long a start waits for the fleet to be known, `leave_s` how long leaving may take.
    """

    beat_s: float = 1.0
    expiry_s: float = 10.0
    gather_s: float = 0.01
    batch_entries: int = 500
    unsent_entries: int = 50_000
    silence_s: float = 5.0
    resync_s: float = 0.5
    retry_s: float = 0.1
    retry_most_s: float = 1.0
    record_s: float = 60.0
    start_s: float = 5.0
    leave_s: float = 2.0
