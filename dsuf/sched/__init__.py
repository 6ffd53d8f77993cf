"""Scheduling: which turn computes what in the next step, and every turn's way from submission to its ending.

Imports `types`, `errors` and `observe`; the engine comes in as the protocol of `types`. Decisions are pure functions
(`policy`, `queue`), the loop around them (`scheduler`) is thin.

- A step serves every decoding turn and at most one chunk of one prompt, so a token waits for at most one chunk.
- Prefill alternates between the oldest prompt and the shortest rest: a short prompt need not wait for a long one, and
  the oldest gets at least every second chunk whatever arrives.
- The queue is first come, first served within a tenant, and tenants take turns.
- One step runs at a time. Between steps, turns that left are detached, results delivered, and waiting turns admitted.
- A step that raises ends the turns it carried. Several in a row, or one that does not come back in time, make the node
  not ready: everything that waits gets its ending, and an empty step that succeeds makes it ready again.
"""
