"""The model in NumPy: the executable specification, the oracle for kernels, and the engine of a machine without a GPU.

One file a mechanism. Imports `types`, `config`, `errors`, `observe`, `checkpoint`; never `cuda`.

Decided: global rows lie in pages of 128 positions, a page one piece of memory that travels as it is; a sequence outside
an engine has growing stores of its own, and both give the same numbers. The values of index keys that every step reads
are kept beside the bytes, by sequence, since pages are shared. A state has one size at every length. Going on without a
state begins all windows a window before the length and writes no entry that was there: the pages may be shared.
"""
