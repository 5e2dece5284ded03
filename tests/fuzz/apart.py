"""A piece of work in a process of its own, forked from this one: it may crash, hang or take all memory
without doing harm, and what it printed and how it ended is told."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MEMORY = 6 * 2**30
BUSY = 4.0  # what works may take so many times its patience while other work keeps the processors busy


@dataclass(frozen=True)
class Ended:
    """`code` is the exit code, negative for a signal; `error` what it wrote to stderr."""

    code: int
    error: str
    cpu_s: float

    @property
    def crashed(self) -> str | None:
        """What no piece of work may come to, whatever it was given."""
        if self.code < 0:
            return f"ended by signal {signal.Signals(-self.code).name}"
        if "Traceback (most recent call last)" in self.error:
            last = [line for line in self.error.splitlines() if line and not line.startswith(" ")]
            return f"traceback: {last[-1][:300] if last else ''}"
        return None


def apart(
    work: Callable[[], int], room: Path, *, patience_s: float, kill_after_s: float | None = None
) -> Ended:
    """Run `work` in a fork, its output in `room`. It is killed when it has used processors for `patience_s`
    or `BUSY` times as long has passed, which `code` -14 tells, or on purpose after `kill_after_s`."""
    log = room / "stderr"
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            with log.open("wb") as errors, open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), 1)
                os.dup2(errors.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", errors="backslashreplace")
            signal.alarm(0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _limit_memory()
            os.setpgid(0, 0)
            code = work()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code & 0x7F)
    began = time.monotonic()
    wanted = BUSY * patience_s if kill_after_s is None else kill_after_s
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            break
        used_up = kill_after_s is None and _processor_s(child) > patience_s
        if used_up or time.monotonic() - began > wanted:
            os.kill(child, signal.SIGKILL)
            _, status, used = os.wait4(child, 0)
            if kill_after_s is None:
                return Ended(-signal.SIGALRM, _tail(log), used.ru_utime + used.ru_stime)
            break
        time.sleep(0.005)
    code = os.waitstatus_to_exitcode(status)
    return Ended(code, _tail(log), used.ru_utime + used.ru_stime)


def _processor_s(child: int) -> float:
    """Seconds of processors that `child`, which has not been waited for, has used."""
    times = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))


def _tail(log: Path) -> str:
    return log.read_bytes()[-20_000:].decode("utf-8", "replace") if log.exists() else ""
