"""What the host has to do with a step's logits: what it rules out of them, and what it is told of them.

`rules` queues a step's question, the wait for its answer, and the mask; `answers` is the thread that answers, `line`
the questions of one pipeline, `masking` the mask of one turn, which follows what the device says of it. `ratings`
queues and reads log-probabilities, which are those before any mask.

A step has its `Rules` and `Ratings` (`step`, `prefill`), and queues their launches among its own where one of its turns
asks for something. The launcher has the one `Answers`, and tells it of every step that asks, with the maskings of its
turns, before it launches the step; the engine asks it with every result whether an answer failed. Masks themselves come
from above (`dsuf.types.Mask`), opened for a turn's constraint by what was given to the engine.
"""
