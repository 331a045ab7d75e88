"""Devices found, why one is not usable, and how to fix it; for others than the CPU as values."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edgespec.cli.main import main
from edgespec.memory.device_memory import Nvidia, NvidiaGpu
from edgespec.runtimes import cuda, devices, discovery, hardware
from edgespec.runtimes.devices import Device, find_device
from edgespec.runtimes.discovery import DeviceReport, Discovery
from edgespec.runtimes.hardware import Accelerator
from edgespec.runtimes.plugins import PLUGINS, Missing, register_plugin
from edgespec.system import system_info
from edgespec.system.system_info import cpu_quotas, physical_cores

GPU = NvidiaGpu("NVIDIA Test", 24 << 30, 20 << 30)


def test_gpu_is_described_by_its_driver_and_by_what_is_missing() -> None:
    facts = discovery.nvidia_facts(Nvidia("580.65.06", (13, 0), (GPU,)))
    found = discovery.describe("cuda", Device("cuda", cuda.PROVIDER, kind="gpu"), **facts)
    assert (found.is_usable, found.name, found.memory_bytes) == (True, "NVIDIA Test", 24 << 30)
    found = discovery.describe("cuda", Missing("libcudnn is missing", "install it"), **facts)
    assert (found.is_usable, found.problem, found.fix) == (False, "libcudnn is missing", "install it")
    assert discovery.nvidia_facts(None)["driver"] is None


@pytest.mark.parametrize(
    ("name", "available", "platform", "missing"),
    [
        ("coreml", [], "linux", Missing("it works on macOS only")),
        ("coreml", ["CoreMLExecutionProvider"], "darwin", None),
        (
            "directml",
            ["CPUExecutionProvider"],
            "win32",
            Missing("this onnxruntime has no DmlExecutionProvider, only CPUExecutionProvider"),
        ),
    ],
)
def test_built_in_providers_are_missing_by_system_and_build(
    name: str, available: list[str], platform: str, missing: Missing | None
) -> None:
    assert devices.find_missing(name, available, platform) == missing


@pytest.mark.parametrize(("kind", "is_software"), [("GPU", False), ("CPU", True)])
def test_plugin_on_the_processor_is_described_as_software(kind: str, is_software: bool) -> None:
    installed = PLUGINS[0]._replace(module="json")
    chip = SimpleNamespace(type=f"OrtHardwareDeviceType.{kind}", vendor="Maker")
    ort = SimpleNamespace(get_ep_devices=lambda: [SimpleNamespace(ep_name=installed.provider, device=chip)])
    handles = register_plugin(ort, installed)
    assert not isinstance(handles, Missing)
    found = discovery.describe("webgpu", Device("webgpu", installed.provider, handles=handles, kind="gpu"))
    assert (found.is_usable, found.vendor, bool(found.name)) == (True, "Maker", is_software)


def test_device_whose_driver_does_not_compute_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = DeviceReport(device="webgpu:1", kind="gpu", provider="WebGpu", vendor="Maker", is_usable=True)
    answers = {"webgpu:1": Missing("its driver crashed (SIGSEGV)", "install another")}
    monkeypatch.setattr(discovery, "check_driver", answers.__getitem__)
    found = discovery.check_usable(listed)
    assert (found.device, found.vendor, found.is_usable) == ("webgpu:1", "Maker", False)
    assert (found.problem, found.fix) == ("its driver crashed (SIGSEGV)", "install another")
    monkeypatch.setattr(discovery, "check_driver", lambda name: None)
    assert discovery.check_usable(listed) == listed


def test_accelerator_that_nothing_uses_comes_with_what_would() -> None:
    present = [Accelerator("gpu", "AMD"), Accelerator("gpu", "NVIDIA"), Accelerator("npu", "AMD")]
    usable = DeviceReport(device="webgpu", kind="gpu", provider="WebGpuExecutionProvider", is_usable=True)
    ((found, fix),) = discovery.find_unused([usable], present)
    assert found == Accelerator("gpu", "NVIDIA")
    assert "edgespec[cuda]" in fix


def test_accelerators_are_read_from_the_bus(tmp_path: Path) -> None:
    known = {
        "a": ("0x030000", "0x10de"),
        "b": ("0x120000", "0x8086"),
        "c": ("0x020000", "0x8086"),
        "d": ("x", "y"),
    }
    for name, (kind, vendor) in known.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "class").write_text(kind + "\n")
        (tmp_path / name / "vendor").write_text(vendor + "\n")
    found = sorted(hardware._read_bus(tmp_path), key=str)
    assert found == [Accelerator("gpu", "NVIDIA"), Accelerator("npu", "Intel")]
    assert list(hardware._read_bus(tmp_path / "none")) == []


def test_cores_of_two_kinds_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [hardware.count_listed(ranges) for ranges in ("0-3,8", "5", "0-11\n")] == [5, 1, 12]
    monkeypatch.setattr(hardware, "_CPUS", tmp_path)
    monkeypatch.setattr(hardware.sys, "platform", "linux")
    assert hardware.cores().performance is None
    for kind, ranges in (("cpu_core", "0-11"), ("cpu_atom", "12-19")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "cpus").write_text(f"{ranges}\n")
    assert (hardware.cores().performance, hardware.cores().efficiency) == (12, 8)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which processors a process may use")
def test_threads_are_as_many_as_the_cores_that_the_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    monkeypatch.setattr(system_info, "OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(system_info, "CGROUP_MOUNT", tmp_path)
    monkeypatch.setattr(system_info, "_SIBLINGS", str(tmp_path / "{}"))
    found = []
    for processors in ({0}, {0, 1, 4, 5}, {*range(8)}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, processors=processors: processors)
        found.append(hardware.cores().physical)
    assert found == [1, 4, 4]
    for each in range(8):
        (tmp_path / str(each)).write_text(f"{each % 4},{each % 4 + 4}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 4, 5})
    assert physical_cores() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(8)})
    (tmp_path / "cgroup").write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert physical_cores() == 4
    (tmp_path / "a" / "cpu.max").write_text("250000 100000\n")
    assert physical_cores() == 3


def test_on_windows_threads_are_no_more_than_the_affinity_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)
    for processors, wanted in (([0, 2], 2), ([*range(16)], 8), ([], 8)):
        process = SimpleNamespace(cpu_affinity=lambda processors=processors: processors)
        monkeypatch.setattr(psutil, "Process", lambda process=process: process)
        assert physical_cores() == wanted


def test_quotas_of_the_first_version_bound(tmp_path: Path) -> None:
    for group, quota in ((tmp_path / "cpu" / "a", 150_000), (tmp_path / "cpu", -1)):
        group.mkdir(parents=True, exist_ok=True)
        (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (group / "cpu.cfs_period_us").write_text("100000\n")
    assert [*cpu_quotas("4:memory:/a\n3:cpu,cpuacct:/a\n0::/\n", tmp_path)] == [2]


def test_devices_agree_with_what_device_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    usable = [device["device"] for device in document["devices"] if device["is_usable"]]
    assert usable[0] == "cpu"
    assert all(find_device(name).name == name for name in usable)
    assert all(device["why_not"] for device in document["devices"] if not device["is_usable"])
    assert all(list(device)[-2:] == ["why_not", "mend"] for device in document["devices"])
    assert main(["devices"]) == 0
    assert capsys.readouterr().out.startswith("cpu: usable cpu, ")


def test_lines_name_usable_ones_first_and_show_control_characters() -> None:
    lost = DeviceReport(device="x", kind="gpu", provider="P", problem="\x1b[2J", fix="run this")
    here = DeviceReport(device="y", kind="gpu", provider="Q", name="N", driver="1", is_usable=True)
    lines = Discovery((lost, here), ((Accelerator("npu", "Intel"), "install"),)).lines()
    assert lines == [
        "y: usable gpu, N, driver 1 (Q)",
        "x: not usable, \\x1b[2J. To fix it: run this",
        "unused npu of Intel: install",
    ]
