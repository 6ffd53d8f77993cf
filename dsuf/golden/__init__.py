"""Compare an engine with recorded vectors of the official inference code.

DIR holds tiny/, a checkpoint in the released layout, and cases/, safetensors files with inputs and what the official
code made of them in up to three arithmetics: fp32 (nothing rounded), fp32q (the released quantisers only), official
(as released). All sizes come from the configuration in tiny/. A table is printed as the comparison goes on; the exit
code is 0 if every row holds, 1 if one does not, 2 if DIR cannot be used. DIR may leave out whole case files, and whole
arithmetics of a file; if a file lacks anything else of what it should have, that is a row "absent" and exit code 1.

Errors are errors of rows: norm of the difference over norm of the recorded row, shown as median/largest.
"""

from dsuf.golden.commands import add_arguments, run

__all__ = ["add_arguments", "run"]
