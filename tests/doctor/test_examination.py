"""The whole examination: it ends where torch is broken, and runs whatever is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from fuseline.doctor import Check, examination, examine, usable


def test_it_ends_where_torch_cannot_be_used(monkeypatch):
    broken = Check("Software", "torch", "bad", "cannot be imported", "pip install torch")
    monkeypatch.setattr(examination.software, "checks", lambda: iter([broken]))
    assert examine() == [broken]
    assert not usable(examine())


def test_warnings_and_absences_are_usable():
    assert usable(
        [Check("a", "b", "warn", "c", "d"), Check("a", "b", "absent", "c"), Check("a", "b", "ok", "c")]
    )


def test_a_machine_without_compilers_and_native_library_is_usable_and_told_what_mends_it(tmp_path):
    environment = {
        **os.environ,
        "PATH": str(tmp_path),
        "CXX": "no-such-compiler",
        "FUSELINE_NATIVE": "0",
        "FUSELINE_CACHE": str(tmp_path / "cache"),
    }
    environment.pop("FUSELINE_STRICT", None)
    command = [sys.executable, "-m", "fuseline", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    checks = {check["name"]: check for check in told["checks"]}
    assert told["usable"] is True
    assert checks["C++"]["state"] == "warn"
    assert "no-such-compiler" in checks["C++"]["found"]
    assert checks["operations"]["state"] == "warn"
    assert checks["softmax on cpu"]["state"] == "ok"
    assert "by its reference" in checks["softmax on cpu"]["found"]
    assert all(check["mend"] for check in told["checks"] if check["state"] in ("warn", "bad"))
