#!/usr/bin/env python3
"""How long `import kvquilt` and `kvquilt --help` take, in fresh processes.

usage: startup.py [--runs N] [--json OUT]

Prints one JSON document: medians and samples of the whole process in seconds, beside a Python that does nothing
(`bare_s`), and where that was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = {
    "bare_s": [sys.executable, "-c", "pass"],
    "import_s": [sys.executable, "-c", "import kvquilt"],
    "help_s": [sys.executable, "-c", "from kvquilt.cli import main; main()", "--help"],
}


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip() or "not a git checkout"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    samples: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(arguments.runs + 1):
        for name, command in COMMANDS.items():  # in turn, so that a busy moment burdens all alike
            took = seconds(command)
            if turn:  # the first round warms the page cache and writes bytecode
                samples[name].append(took)
    result = {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        **{name: round(statistics.median(values), 4) for name, values in samples.items()},
        "samples": {name: [round(value, 4) for value in values] for name, values in samples.items()},
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
