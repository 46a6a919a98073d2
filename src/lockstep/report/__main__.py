"""Compare finished runs.

python -m lockstep.report outputs/sweeps/TIME              compare a sweep again
python -m lockstep.report outputs/single/A outputs/ddp/B   or any runs
"""

import argparse
import sys
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.report import write_comparison


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lockstep.report", description="Compare finished runs.")
    parser.add_argument("paths", nargs="+", type=Path, help="run folders, or folders that hold some")
    parser.add_argument("--output", type=Path, help="where the files go; default: the first path")
    arguments = parser.parse_args()
    try:
        comparisons = write_comparison(arguments.paths, arguments.output or arguments.paths[0])
    except ConfigError as error:
        sys.exit(f"error: {error}")
    if not comparisons:
        sys.exit("error: fewer than two finished runs there; a comparison needs two")


if __name__ == "__main__":
    main()
