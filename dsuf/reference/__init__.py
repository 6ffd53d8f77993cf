"""The model in NumPy: the executable specification, the oracle for kernels, and the engine of a machine without a GPU.

One file a mechanism. Imports `types`, `config`, `errors`, `observe`, `checkpoint`; never `cuda`.
"""
