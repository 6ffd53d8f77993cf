"""The CUDA engine: kernels compiled from `kernels/`, all that queues them, and the engine protocol in front.

From the bottom: `driver`, `toolchain`, `contract`, `table`, `kernels` (one launch); `arena`, `weights`, `caches`,
`turns`, `workspace`, `constants` (all memory, planned by name before any is taken); `launches` (one pass), `attention`,
`moe`, `block`, `model`, `draft`, `ends`, `logits`, `step`, `prefill` (what a pass is made of); `streams`, `graphs`,
`results`, `states`, `pages` (how it runs, and what leaves the device); `machine`, `launcher`, `handover`, `engine`.
`plan`, `budget` and `group` say what several GPUs would hold; `peers`, `ranks`, `split` and `rank_loader` run one model
on ranks; `devices` opens several GPUs.

Imports `types`, `config`, `errors`, `observe` and `checkpoint`; never `reference`, which tests and `golden` alone
compare with. cuda-python is optional: without it, without a driver or without nvcc a command says in one line what is
missing. Decided here:

- A kernel reads everything that differs from step to step from device memory. So a pass of a given shape is captured
  once and replayed, and the host can launch step n + 1 before it has read step n.
- One thread launches, in the order of the calls; it never waits for the device. The event loop polls a ring of records
  in pinned memory, whose sequence number the device writes last.
- Prefill and decode have a stream and a workspace each; a turn goes from one to the other behind an event. Within a
  pass, what does not depend on each other runs on side streams, which a captured pass keeps as branches.
- Rows of a long pass read each other's window rows beside the rings, so its length does not depend on the rings'.
- A replayed prefill ends with an ordinary pass over the last window, which computes the encoder's part of it again:
  the same numbers in the same places, and no second kind of pass.
- A slot that was filled from a state has the rows of the state and no older ones. So a turn remembers the least length
  that it can be cut back to, and a state says how many of its last positions a prompt may leave off.
- Ranks with GPUs of their own are driven by the one thread: a stream is one on each GPU, a captured pass a graph on
  each, and they meet in each other's memory alone. Ranks that share a GPU share its streams: with their own, launches
  that wait for their inputs could take all the room that those need which they wait for.
- Ranks divide the rows of a prefill among them for all that a rank does to a row alone, and gather what needs all rows:
  the launches of a pass are the same, `split` says which of them go to a share. No bit changes.
- Pages that were there before a turn are left out of the table through which it writes: shared rows stay as they are.
"""
