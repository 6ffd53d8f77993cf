"""Serve a model over HTTP in the foreground; ready when GET /readyz answers 200.

Settings come from dsuf.toml in the current directory (or --config), then from environment variables DSUF_..., then from
flags; --print-config shows the result. SIGTERM and Ctrl-C let running streams finish; a second one stops at once.
"""

import argparse
import os
from pathlib import Path

from dsuf import config, node


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `dsuf serve`: one for each setting, and where settings come from."""
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="settings file (default: dsuf.toml, if there is one)"
    )
    parser.add_argument("--print-config", action="store_true", help="print the settings that result, and serve nothing")
    config.add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Load the settings and serve; raises `CommandError` for a setting that cannot be."""
    settings = config.load_settings(vars(args), os.environ, args.config or config.find_file())
    if args.print_config:
        print(config.describe(settings))
        return 0
    return node.serve(settings)
