"""One node: the parts built from settings, started, watched, drained and stopped.

Imports everything; nothing but the command line imports it. The only layer that imports uvloop.

- One process, one event loop. The engine computes in a thread of its own, rendering and loading in others.
- The port is bound before anything else, so a taken port is known at once; `/health` answers while weights load, and
  `/readyz` turns to 200 after a warm-up turn.
- Ready means forward progress: a step or an idle probe came back in time. A node that drains is alive and not ready.
- SIGTERM drains: no new turns, running ones finish within `drain_s`, what is left then ends as its protocol has it. A
  second signal does not wait. SIGINT (Ctrl-C) does the same and exits with 130.
- Threads share one heap of the C library, and twice a minute what is free in it goes back to the system.
- The thread switch interval is 0.5 ms instead of Python's 5: much of the engine's thread is short NumPy calls that keep
  the interpreter's lock, and this bounds how long the loop waits for it. Throughput did not change measurably.
"""

from dsuf.node.node import serve

__all__ = ["serve"]
