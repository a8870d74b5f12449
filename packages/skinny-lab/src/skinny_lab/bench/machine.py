"""The machine of a measurement: what has to stand beside a number for it to mean anything."""

from __future__ import annotations

import datetime
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from skinny_core.plan import Environment


@dataclass(frozen=True, slots=True)
class Gpu:
    """State read from the driver: clocks in MHz, other processes with memory on this GPU."""

    sm_mhz: int
    memory_mhz: int
    driver: str
    others: int


def gpu(index: int = 0) -> Gpu:
    """Read the driver through `nvidia-smi`; zeros where it cannot be asked."""
    if not torch.cuda.is_available():
        return Gpu(0, 0, "unknown", 0)
    fields = _smi(index, "--query-gpu=clocks.sm,clocks.mem,driver_version")
    pids = {p for p in _smi_lines(index, "--query-compute-apps=pid") if p.isdigit()}
    if len(fields) != 3:
        return Gpu(0, 0, "unknown", 0)
    sm, memory, driver = fields
    # This process appears under a number of another namespace in a container, so only a second one is told.
    return Gpu(int(sm), int(memory), driver, max(0, len(pids) - 1))


def alive() -> bool:
    """Whether the CUDA context still works; after an illegal access it does not, and this process cannot measure."""
    try:
        torch.cuda.synchronize()
    except Exception:  # what torch raises here depends on how the device failed
        return False
    return True


def sm_clock(index: int = 0) -> int:
    """SM clock in MHz, quickly: through the driver's library rather than a process; 0 where `pynvml` is absent."""
    try:
        return int(torch.cuda.clock_rate(index))
    except Exception:  # no pynvml, no permission, no device: the clock is a remark, never a reason to stop
        return 0


def environment(index: int = 0, *, commit: str = "") -> Environment:
    """Everything that describes this run, for a plan file. commit: where it is not measured in a checkout."""
    return Environment(
        gpu=torch.cuda.get_device_name(index),
        driver=gpu(index).driver,
        torch=str(torch.__version__),  # a str subclass that does not serialise
        cuda=torch.version.cuda or "",
        dsl=" ".join(f"{name} {_version(name)}" for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi", "triton")),
        commit=commit or checkout_commit(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        command=command(),
    )


def command() -> str:
    """This process's command line, without the folders that a file lies in on this machine: results are published."""
    program, *arguments = sys.argv
    shortened = (Path(argument).name if argument.startswith(("/", "~")) else argument for argument in arguments)
    return " ".join([Path(program).name, *shortened])


def checkout_commit() -> str:
    """Commit of the source tree, with "+" where it has uncommitted changes; "" outside a checkout."""
    here = Path(__file__).resolve().parent
    top = Path(_run(["git", "-C", str(here), "rev-parse", "--show-toplevel"]) or "/")
    if not (top / "core" / "src" / "skinny_core").is_dir():
        return ""  # installed into somebody else's repository: its commit says nothing about these sources
    head = _run(["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"])
    dirty = _run(["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"])
    return head + ("+" if head and dirty else "")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _smi(index: int, query: str) -> list[str]:
    lines = _smi_lines(index, query)
    return [part.strip() for part in lines[0].split(",")] if lines else []


def _smi_lines(index: int, query: str) -> list[str]:
    # nvidia-smi counts all boards, torch only the visible ones: the UUID names one board for both.
    uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    return _run(["nvidia-smi", f"--id={uuid}", query, "--format=csv,noheader,nounits"]).splitlines()


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
