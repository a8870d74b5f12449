"""The command `skinny capture vllm`, as typed. Arguments: the model folder, then options; writes c.json."""

from __future__ import annotations

import subprocess
import sys

from checks import report


def main(*arguments: str) -> None:
    """Run it to its end; its exit status and stdout are reported."""
    command = [sys.executable, "-m", "skinny_lab", "capture", "vllm", *arguments, "--random", "--out", "c.json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report(status=done.returncode, output=done.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
