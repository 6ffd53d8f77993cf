"""Session caches that outlive their turn: where they are kept, how a prompt finds one, when one is left behind.

Imports `types`, `errors` and `observe`; the engine comes in as the protocol of `types`.

- A *commit point* is a copy of a session's cache at some length, from which a turn can go on as if it had computed the
  positions itself. They are made at some chunk ends of a prefill, at its end, and at the end of a turn that did
  not fail. Between commit points a prompt falls back to the nearest one before, except for the few last positions that
  a commit point can spare. Replaying a window to resume anywhere is not done.
- Each commit point holds rows of its own. On the way through a long prompt each is half again as long as the one
  before, so all of them together hold a few times the rows of the last.
- Write, then publish: a copy is found only after its checksum was taken. It is verified whenever it is used, and one
  whose use failed is withdrawn; the turn then computes everything itself.
- A hash finds, tokens decide: what is found is compared by fingerprint, salt, tokens and picture digests.
- Of the budget's entries the one goes first that saves the least computed tokens a byte, counting how often it was used
  and how long ago. What is in use stays.
"""
