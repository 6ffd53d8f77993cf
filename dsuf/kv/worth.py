"""Which commit point goes first: the one that saves the least computed tokens a block, of both what only it has.

Two commit points near the end of a long session save little, each beside the other. Counted by their whole lengths and
the few blocks that are theirs alone, such a pair would stay for ever.
"""

import heapq
from itertools import count

from dsuf.kv.point import CommitPoint, HostPage


class Ranking:
    """Commit points by worth. What was last used before the last eviction counts from there: so age counts too.

    The order is kept lazily: a place that is out of date is put right when it comes up.
    """

    def __init__(self) -> None:
        self.replay_tokens = 0
        self._floor = 0.0
        self._heap: list[tuple[float, int, CommitPoint]] = []
        self._ready = 0
        self._numbers = count()  # the older of two equals goes first

    def value(self, point: CommitPoint) -> None:
        """`point` is new or was of use."""
        point.since = self._floor
        self._place(point)

    def pop(self) -> CommitPoint | None:
        """The commit point of the least worth that nobody uses, which is ranked no more; None if there is none."""
        leased, found = [], None
        while self._heap and found is None:
            worth, _, point = heapq.heappop(self._heap)
            if point.state != "ready" or worth != point.worth:
                continue
            if point.leases:
                leased.append(point)
            elif self._worth(point) > worth:
                self._place(point)
            else:
                found = point
        for point in leased:
            self._place(point)
        if found is not None:
            self._floor = max(self._floor, found.worth)
        return found

    def widow(self, page: HostPage) -> None:
        """Something that stood on `page` is gone; if one commit point is left, it holds more alone than before."""
        while page.holds == 1 and page.followers:
            page = page.followers[0]
        if page.holds == 1 and page.points and page.points[0].state == "ready":
            self._place(page.points[0])

    def _place(self, point: CommitPoint) -> None:
        """Put `point` where it belongs now; an older place of it is no longer valid."""
        point.worth = self._worth(point)
        heapq.heappush(self._heap, (point.worth, next(self._numbers), point))
        if len(self._heap) > 64 and len(self._heap) > 4 * self._ready:
            live = {entry[2]: entry for entry in self._heap if entry[2].state == "ready" and entry[0] == entry[2].worth}
            self._heap = sorted(live.values(), key=lambda entry: entry[:2])
            self._ready = len(live)

    def _worth(self, point: CommitPoint) -> float:
        """Tokens saved a block and use, on top of what the last evicted one was worth when `point` was last of use."""
        tokens, blocks = point.own(self.replay_tokens)
        return point.since + (1 + point.uses) * tokens / max(1, blocks)
