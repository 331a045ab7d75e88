"""Devices found, why one is not usable, and the line that mends it. Of others than the CPU by values."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.cli import main
from edgespec.devices_command import lines_of
from edgespec.nvml import Nvidia, NvidiaGpu
from edgespec.runtimes import cuda, discovery, hardware
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.discovery import Discovery, Found
from edgespec.runtimes.hardware import Accelerator
from edgespec.runtimes.plugins import PLUGINS, mend_of

GPU = NvidiaGpu("NVIDIA Test", 24 << 30, 20 << 30)


def test_gpu_is_told_by_its_driver_and_by_what_it_lacks() -> None:
    driver = Nvidia("580.65.06", (13, 0), (GPU,))
    found = discovery.nvidia_found(driver, None)
    assert (found.is_usable, found.name, found.memory_bytes) == (True, "NVIDIA Test", 24 << 30)
    found = discovery.nvidia_found(driver, cuda.Lack("libcudnn is missing", "install it"))
    assert (found.is_usable, found.why_not, found.mend) == (False, "libcudnn is missing", "install it")
    assert discovery.nvidia_found(None, cuda.Lack("no driver", "install one")).driver is None


@pytest.mark.parametrize(
    ("name", "available", "platform", "expected"),
    [
        ("coreml", [], "linux", (False, "is for macOS alone", None)),
        ("coreml", ["CoreMLExecutionProvider"], "darwin", (True, None, None)),
        (
            "directml",
            [],
            "win32",
            (
                False,
                "this onnxruntime lacks it",
                "pip uninstall -y onnxruntime && pip install onnxruntime-directml",
            ),
        ),
    ],
)
def test_built_in_providers_are_told_by_system_and_build(
    name: str, available: list[str], platform: str, expected: tuple[Any, ...]
) -> None:
    found = discovery.built_in(name, available, platform)
    assert (found.is_usable, found.why_not, found.mend) == expected


@pytest.mark.parametrize(
    ("why_not", "mend"),
    [
        ("it does not load: libvulkan.so.1: cannot open shared object file", "libvulkan1"),
        ("it does not load: /lib/libc.so.6: version `GLIBC_2.38' not found", "C library is too old"),
        ("it finds no device that it can use", "Vulkan, Direct3D 12 or Metal"),
        ("it does not load: torn", "pip install --force-reinstall onnxruntime-ep-webgpu"),
    ],
)
def test_plugin_that_does_not_serve_names_what_mends_it(why_not: str, mend: str) -> None:
    assert mend in mend_of(PLUGINS[0], why_not)


@pytest.mark.parametrize(("kind", "is_software"), [("GPU", False), ("CPU", True)])
def test_plugin_on_the_processor_is_told_as_software(kind: str, is_software: bool) -> None:
    installed = PLUGINS[0]._replace(module="json")
    chip = SimpleNamespace(type=f"OrtHardwareDeviceType.{kind}", vendor="Maker")
    ort = SimpleNamespace(get_ep_devices=lambda: [SimpleNamespace(ep_name=installed.provider, device=chip)])
    found = discovery.plugin_found(ort, installed)
    assert (found.is_usable, found.vendor, bool(found.name)) == (True, "Maker", is_software)


def test_accelerator_that_nothing_uses_is_told_with_what_would() -> None:
    present = [Accelerator("gpu", "AMD"), Accelerator("gpu", "NVIDIA"), Accelerator("npu", "AMD")]
    usable = Found(device="webgpu", kind="gpu", provider="WebGpuExecutionProvider", is_usable=True)
    ((found, mend),) = discovery.unused([usable], present)
    assert found == Accelerator("gpu", "NVIDIA")
    assert "edgespec[cuda]" in mend


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
    found = sorted(hardware._on_bus(tmp_path), key=str)
    assert found == [Accelerator("gpu", "NVIDIA"), Accelerator("npu", "Intel")]
    assert list(hardware._on_bus(tmp_path / "none")) == []


def test_cores_of_two_kinds_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [hardware.num_listed(ranges) for ranges in ("0-3,8", "5", "0-11\n")] == [5, 1, 12]
    monkeypatch.setattr(hardware, "_CPUS", tmp_path)
    monkeypatch.setattr(hardware.sys, "platform", "linux")
    assert hardware.cores().performance is None
    for kind, ranges in (("cpu_core", "0-11"), ("cpu_atom", "12-19")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "cpus").write_text(f"{ranges}\n")
    assert (hardware.cores().performance, hardware.cores().efficiency) == (12, 8)


def test_devices_agree_with_what_device_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    usable = [device["device"] for device in document["devices"] if device["is_usable"]]
    assert usable[0] == "cpu"
    assert all(find_device(name).name == name for name in usable)
    assert all(device["why_not"] for device in document["devices"] if not device["is_usable"])
    assert main(["devices"]) == 0
    assert capsys.readouterr().out.startswith("cpu: usable cpu, ")


def test_lines_name_usable_ones_first_and_show_control_characters() -> None:
    lost = Found(device="x", kind="gpu", provider="P", why_not="\x1b[2J", mend="run this")
    here = Found(device="y", kind="gpu", provider="Q", name="N", driver="1", is_usable=True)
    lines = lines_of(Discovery((lost, here), ((Accelerator("npu", "Intel"), "install"),)))
    assert lines == [
        "y: usable gpu, N, driver 1 (Q)",
        "x: not usable, \\x1b[2J. To mend that: run this",
        "unused npu of Intel: install",
    ]
