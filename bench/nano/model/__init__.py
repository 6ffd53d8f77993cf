"""The model of `dsuf.reference` once more, in PyTorch and differentiable: what is trained and then exported.

Rows are the positions of all sequences of a batch laid end to end, every sequence of the same length. Decided: no shape
depends on data, so that a step can be captured; experts are computed densely; what the release rounds is rounded at the
same points, with gradients passed straight through; discrete choices take no gradient. `sparse` attends to the selected
entries, `dense` to all visible ones, which is for short sequences.
"""

from bench.nano.model.nano import METRICS, Mode, Nano, Outcome

__all__ = ["METRICS", "Mode", "Nano", "Outcome"]
