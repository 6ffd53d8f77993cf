"""How many CPU threads matrix products use.

More than one runs worse than one as soon as something else wants a core: the library's threads wait for each other by
spinning. So by default one core is left to the event loop and the rest of the machine.
"""

import os

from threadpoolctl import threadpool_info, threadpool_limits


def limit_threads(count: int) -> None:
    """Let matrix products use `count` threads; 0 means all cores but one, and at least one."""
    threadpool_limits(count or max(1, len(os.sched_getaffinity(0)) - 1), user_api="blas")


def count_threads() -> int:
    """The most threads that a loaded library of matrix products uses; 1 where none is loaded."""
    return max((pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), default=1)
