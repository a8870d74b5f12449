"""A child process that is asked one JSON line at a time: start, ask, end.

The child writes one JSON object per answer to its standard output and nothing else; whatever it logs goes to a file,
whose end is part of every error. A child that is not asked waits for a line and uses nothing but memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TAIL = 3000
"""Characters of a log that are shown."""
GRACE_SECONDS = 10.0
"""For a child that was told to end, before it is killed."""


class EngineError(RuntimeError):
    """A child died, was silent, or said something that is no answer; the end of its log is part of the text."""


class EngineProcess:
    """One child. name: for messages. log: its standard error, appended to. process_group: its own, so that whatever it
    starts can be ended with it; not a session of its own, so that it ends with the caller's machine."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=dict(environment),
                text=True, encoding="utf-8", errors="replace", process_group=0,
            )  # fmt: skip
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ended = False

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Write one line, return the answer; raises `EngineError`."""
        assert self._process.stdin is not None
        # A child that died is told by the answer that does not come, with its status and its log.
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self.answer(seconds)

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next answer, at most `seconds` from now; raises `EngineError`, and then the child has been ended."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, min(1.0, deadline - time.monotonic())))
                break
            except queue.Empty:
                # What the child started may hold its end of the pipe open after it died.
                if self._is_dead():
                    line = None
                    break
                if time.monotonic() >= deadline:
                    raise self._error(f"gave no answer within {seconds:.0f} s") from None
        if line is None:
            raise self._error("ended")
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self._error(f"answered {line.strip()[:200]!r}, which is no JSON object")
        if "error" in found:
            raise self._error(f"failed: {found['error']}")
        return found

    def end(self, seconds: float = GRACE_SECONDS) -> None:
        """Close its input and wait; kill it and all it started after `seconds`. Ending twice is once."""
        if self._ended:
            return
        self._ended = True
        self.dismiss()
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while not self._is_dead() and time.monotonic() < deadline:
            time.sleep(0.05)
        # Before it is reaped: until then its number, which names the group, cannot be given to another process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=2)
        # Held open by something that left the group: closing would wait for the reader, and the reader for that.
        if not self._reader.is_alive():
            self._process.stdout.close()

    def dismiss(self) -> None:
        """Close its input, which tells it to end, and do not wait: several end at the same time that way."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()

    def tail(self) -> str:
        """The end of its log."""
        try:
            return self.log.read_bytes()[-4 * TAIL :].decode(errors="replace")[-TAIL:]
        except OSError as error:
            return f"no log: {error}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                if line.strip():
                    self._lines.put(line)
        self._lines.put(None)

    def _is_dead(self) -> bool:
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # reaped already
            return True

    def _error(self, what: str) -> EngineError:
        self.end(1.0 if what == "ended" else 0.0)
        if what == "ended":
            what = f"ended with status {self._process.returncode}"
        return EngineError(f"{self.name} {what} ({self.log}):\n{self.tail()}")
