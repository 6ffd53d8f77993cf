"""Scheduling: which turn computes what in the next step, and every turn's way from submission to its ending.

Imports `types`, `errors`, `observe` and `kv`; the engine comes in as the protocol of `types`. Decisions are pure
functions of plain state (`policy`, `fairness`, `cost`, `preemption`, `queue`); the loop around them (`scheduler`) is
thin.

- A turn's way: `reception` (let in or refused; first to `intake` where another node computes its prompt), `queue`,
  `admission` (pages, then a place), `places` (attached; its cache is filled beside the steps of others), `planner` and
  `flight` (steps), `delivery` (results), `endings`.
- One step is always under way: the next one is launched behind the running one, on what that one is expected to leave.
  So results are looked at one step late, and a turn whose end nobody foresaw is named in one step more, which gives it
  nothing. What is to be kept of a turn is asked for right behind the step that brings it there.
- Results are handed on, and the next step is launched, where the engine tells that a step is done, without waking a
  task in between: only a reader that has to wait for its client is woken, and then goes first.
- The gap between a stream's tokens is bounded, whatever prompts arrive: steps are planned by what they are expected to
  take, and the chunk of a prompt shrinks until its step fits. It never shrinks below a least chunk, so that prompts
  progress; and it grows by steps, so that no engine is taken by surprise.
- Tenants share engine time alike: with k of them at work each keeps a k-th of the rate that it would have alone,
  however many streams the others have. Where serving all at once costs nobody more than that, nobody yields. Places
  are shared alike too: where all are taken, a tenant with fewer takes one from a tenant with more.
- Lower priority numbers go first: in the queue, in prefill, and for the places and pages of running turns, which are
  put back then and go on later from where they were; where prompts are replayed, only if there is room for their state
  until then, as no other state gives the same tokens. In a priority the tenant with fewest places is next, and of those
  alike each in turn; of a tenant it is first come, first served, so nothing starves behind smaller turns.
- What can never fit is refused at once, what waits is bounded, and a deadline ends a turn at any stage.
- A step that raises ends the turns it carried. Several in a row, or one that does not come back in time, make the node
  not ready: everything that waits gets its ending, and an empty step that succeeds makes it ready again.
- Some turns with drafts are computed again without, while nobody wants the engine: drafts must change no answer.
"""
