"""What waits at the meetings of ranks come to: how much of a step, and how far ranks are ahead of each other."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Waits(NamedTuple):
    """Microseconds that a rank waited at each of its meetings in one run, and at which of them all ranks meet.

    At the others some follow the choice of one.
    """

    us: NDArray[np.float64]
    all_meet: NDArray[np.bool_]


def describe_waits(runs: Sequence[Sequence[Waits]], step_ms: Sequence[float]) -> dict[str, object]:
    """Figures of runs, of each the waits by rank and the milliseconds of the step; pure.

    How far one rank is ahead of another at a meeting is the difference of their waits.
    """
    waited = np.array([[waits.us.sum() for waits in ranks] for ranks in runs])
    shares = waited / (np.array(step_ms)[:, None] * 1e3)
    met = np.array([[waits.us[waits.all_meet] for waits in ranks] for ranks in runs])  # [runs, ranks, meetings]
    skew = (met.max(axis=1) - met.min(axis=1)).reshape(-1)
    return {
        "meetings": met.shape[2], "waited_us": [round(float(v), 1) for v in np.median(waited, axis=0)],
        "share_waited": [round(float(v), 4) for v in np.median(shares, axis=0)],
        "wait_median_us": round(float(np.median(met)), 2), "skew_median_us": round(float(np.median(skew)), 2),
        "skew_p90_us": round(float(np.quantile(skew, 0.9)), 2), "skew_max_us": round(float(skew.max()), 2),
    }  # fmt: skip
