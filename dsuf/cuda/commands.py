"""Build, list or check the CUDA kernels.

build compiles every source for a target, unless the binary is kept from before, and prints registers, shared memory and
spills. list says what there is, without a compiler. check builds for the GPU of this machine and loads every kernel.
The sizes come from a configuration file; the target from --sm, else DSUF_SM, else this machine's GPU, else sm_90a.
"""

import argparse
import os
from pathlib import Path

from dsuf.checkpoint.config import load_config
from dsuf.checkpoint.forms import RELEASED
from dsuf.cuda.kernels import Device, Kernels
from dsuf.cuda.sizes import Sizes, from_config
from dsuf.cuda.table import KERNELS, SOURCES
from dsuf.cuda.toolchain import TARGETS, Binary, find_toolchain
from dsuf.errors import CommandError, DeviceError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `dsuf kernels`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    build = actions.add_parser("build", help="compile for a target and show what each kernel uses", allow_abbrev=False)
    build.add_argument("--sm", metavar="TARGET", help=f"{', '.join(TARGETS)}, or all")
    check = actions.add_parser("check", help="compile for this GPU and load every kernel", allow_abbrev=False)
    for action in (build, check):
        action.add_argument(
            "--config", metavar="FILE", type=Path, default=RELEASED / "config.json",
            help="whose sizes are compiled in (default: the released ones)",
        )  # fmt: skip
    actions.add_parser("list", help="name every kernel, its source and its parameters", allow_abbrev=False)


def run(args: argparse.Namespace) -> int:
    """Carry out the action; 0, or `CommandError` where a compiler, a driver or the right device is missing."""
    if args.action == "list":
        for kernel in KERNELS.values():
            print(f"{kernel.entry:22} any/{kernel.source}.cu  {kernel.params.name}")
        return 0
    sizes = from_config(load_config(args.config))
    if args.action == "check":
        return _check(sizes)
    for sm in _targets(args.sm):
        _print(find_toolchain().build_all(SOURCES, sm, sizes.macros()))
    return 0


def _check(sizes: Sizes) -> int:
    """Build for the device that is there, and load."""
    device = Device()
    wanted = os.environ.get("DSUF_SM", device.sm)
    if wanted != device.sm:
        raise CommandError(f"DSUF_SM is {wanted}, {device.name} is {device.sm}")
    binaries = find_toolchain().build_all(SOURCES, device.sm, sizes.macros())
    try:
        Kernels(device, binaries, sizes)
    except DeviceError as error:
        raise CommandError(f"{device.name}: {error}") from error
    _print(binaries)
    print(f"{len(KERNELS)} kernels load on {device.name} ({device.sm})")
    return 0


def _targets(stated: str | None) -> tuple[str, ...]:
    """The targets to build for; raises `CommandError` for an unknown one."""
    chosen = stated or os.environ.get("DSUF_SM") or _device_target()
    if chosen == "all":
        return TARGETS
    if chosen not in TARGETS:
        raise CommandError(f"{chosen} is not a target: {', '.join(TARGETS)}, or all")
    return (chosen,)


def _device_target() -> str:
    """This machine's target, or the first one where it has no device."""
    try:
        return Device().sm
    except CommandError:
        return TARGETS[0]


def _print(binaries: list[Binary]) -> None:
    """A line an entry."""
    print(f"{'kernel':22} {'target':8} {'registers':>9} {'shared':>7} {'spills':>7}")
    for binary in binaries:
        for entry in binary.entries:
            used = f"{entry.registers:9} {entry.shared_bytes:7} {entry.spill_bytes:7}"
            print(f"{entry.entry:22} {binary.sm:8} {used}")
