"""The probe of a device, here of the CPU."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.errors import DeviceUnavailable
from edgespec.runtimes import probe as probing
from edgespec.runtimes.devices import find_device, may_have_accelerator
from edgespec.runtimes.hardware import vulkan_drivers
from edgespec.runtimes.probe import FILE_NAME, DeviceProbe, probe_device, read_probes, write_probe

CPU = find_device("cpu")
PROBE = DeviceProbe(bytes_per_s=1e10, node_s=1e-6, start_s=1e-5, rows={1: 1.0, 4: 1.5})


@pytest.mark.parametrize("form", ["cpu", "gpu", "npu"])
def test_each_form_is_probed_on_a_graph_of_its_kind(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_MANY_BYTES", 1 << 20)
    monkeypatch.setattr(probing, "_FEW_BYTES", 1 << 20)
    found = probe_device(CPU, form, 1)
    assert 1e7 < found.bytes_per_s < 1e13
    assert 0 < found.start_s < 0.1
    assert 0 <= found.node_s < 0.01
    assert set(found.rows) == ({1} if form == "npu" else {1, 2, 4, 8})


def test_device_that_runs_no_such_graph_says_so() -> None:
    missing = replace(CPU, name="webgpu", provider="NoSuchExecutionProvider")
    with pytest.raises(DeviceUnavailable, match="webgpu"):
        probe_device(missing, "gpu")


def test_probes_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_probes(tmp_path) == {}
    write_probe(tmp_path, "cpu", PROBE)
    write_probe(tmp_path, "webgpu", replace(PROBE, start_s=1.0))
    assert read_probes(tmp_path) == {"cpu": PROBE, "webgpu": replace(PROBE, start_s=1.0)}


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"version": 2, "probes": {}}', '{"version": 1, "probes": 3}']
)
def test_damaged_probes_are_made_again(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE_NAME).write_text(content)
    assert read_probes(tmp_path) == {}
    write_probe(tmp_path, "cpu", PROBE)
    assert read_probes(tmp_path) == {"cpu": PROBE}


def test_many_devices_leave_the_latest(tmp_path: Path) -> None:
    for i in range(70):
        write_probe(tmp_path, f"device {i}", PROBE)
    assert set(read_probes(tmp_path)) == {f"device {i}" for i in range(6, 70)}


def test_accelerator_is_looked_for_among_the_files_of_devices(tmp_path: Path) -> None:
    assert not may_have_accelerator("linux", tmp_path)
    assert may_have_accelerator("win32", tmp_path)
    (tmp_path / "dri").mkdir()
    assert not may_have_accelerator("linux", tmp_path)
    (tmp_path / "dri" / "renderD128").touch()
    assert may_have_accelerator("linux", tmp_path)


def test_drivers_of_vulkan_are_told_apart_by_their_versions(tmp_path: Path) -> None:
    (tmp_path / "radeon.json").write_text('{"ICD": {"api_version": "1.4.305", "library_path": "radeon.so"}}')
    (tmp_path / "broken.json").write_text("{")
    (first,) = vulkan_drivers({}, (tmp_path, tmp_path / "none"))
    assert first.startswith("radeon 1.4.305 ")
    (tmp_path / "radeon.json").write_text('{"ICD": {"api_version": "1.4.306", "library_path": "radeon.so"}}')
    assert list(vulkan_drivers({"VK_ICD_FILENAMES": str(tmp_path / "radeon.json")})) != [first]


def test_a_driver_is_the_same_whenever_its_description_was_written(tmp_path: Path) -> None:
    """And another one once its library is another one, whatever the description states."""
    library, file, seen = tmp_path / "lvp.so", tmp_path / "lvp.json", list[str]()
    for content, written_s in ((b"driver", 1), (b"driver", 2), (b"a newer driver", 2)):
        library.write_bytes(content)
        os.utime(library, (5, 5))
        file.write_text(json.dumps({"ICD": {"api_version": "1.4.305", "library_path": "./lvp.so"}}))
        os.utime(file, (written_s, written_s))
        seen += vulkan_drivers({"VK_DRIVER_FILES": str(file)})
    assert len(seen) == 3
    assert seen[0] == seen[1] != seen[2]
