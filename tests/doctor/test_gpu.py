"""GPU and driver, with the machine's answers made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fuseline import native
from fuseline.doctor import gpu
from fuseline.native import Compiler, Search


def nvcc(release: str | None) -> dict[str, Search]:
    compiler = Compiler(("nvcc",), f"Cuda compilation tools, release {release}", "PATH") if release else None
    return {"nvcc": Search("nvcc", compiler, (), "")}


@pytest.fixture
def machine(monkeypatch):
    """Makes a machine: its GPUs' capabilities, the driver's CUDA, torch's CUDA and nvcc's."""

    def make(devices=(), driver=None, torch_cuda=None, toolkit=None):
        monkeypatch.setattr(gpu, "driver_cuda", lambda: driver)
        monkeypatch.setattr(torch.version, "cuda", torch_cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(devices))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
        properties = [
            SimpleNamespace(name="Imaginary GPU", major=major, minor=minor, total_memory=80 * 2**30)
            for major, minor in devices
        ]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties[i])
        monkeypatch.setattr(native, "compilers", lambda: nvcc(toolkit))
        monkeypatch.setattr(gpu, "_nvml", lambda: iter(()))
        return {check.name: check for check in gpu.checks()}

    return make


def test_a_machine_without_gpu_is_well(machine):
    checks = machine()
    assert {check.state for check in checks.values()} == {"absent"}


def test_each_gpu_has_its_row(machine):
    checks = machine([(9, 0), (7, 5)], driver=(13, 0), torch_cuda="13.0", toolkit="13.0")
    assert checks["cuda:0"].state == "ok"
    assert "compute 9.0, 80 GiB" in checks["cuda:0"].found
    assert checks["cuda:1"].state == "warn"
    assert "8.0" in checks["cuda:1"].mend


def test_a_driver_beside_a_torch_without_cuda_is_told(machine):
    check = machine(driver=(13, 0))["devices"]
    assert check.state == "warn"
    assert "without CUDA" in check.found
    assert check.mend


@pytest.mark.parametrize(
    "driver, torch_cuda, toolkit, state",
    [
        ((13, 0), "13.0", "13.1", "ok"),  # within a major version the driver serves
        ((13, 0), "12.8", "12.9", "ok"),
        ((12, 8), "12.8", "13.0", "warn"),  # only our own kernels cannot run
        ((12, 8), "13.0", None, "bad"),
    ],
)
def test_the_driver_is_held_against_torch_and_toolkit(machine, driver, torch_cuda, toolkit, state):
    check = machine([(9, 0)], driver=driver, torch_cuda=torch_cuda, toolkit=toolkit)["driver"]
    assert check.state == state
    assert ("580" in check.mend) == (state != "ok")


def test_the_driver_is_asked_without_torch(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(gpu.ctypes, "CDLL", missing)
    assert gpu.driver_cuda() is None
