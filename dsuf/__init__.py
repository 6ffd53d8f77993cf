"""dsuf: an inference server for one model, DeepSeek-V4.1-Flash.

Layers, lowest first: `types`, `config`, `errors`; `observe`; `checkpoint`; the leaves `reference` (NumPy), `recipe`,
`kv`; then `sched`, `api`, and `node`, which builds the parts. Imports only go down; `tests/test_layers.py` keeps it so.
"""

__version__ = "0.1.0"
