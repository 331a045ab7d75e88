"""The script that runs a command with a GPU in software: what it writes is the same at each start."""

import json
import os
from pathlib import Path

import pytest
import software_gpu

from edgespec.runtimes.hardware import vulkan_drivers


def test_each_start_finds_the_driver_of_the_start_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    root = tmp_path / "lavapipe" / "usr"
    library, file = root / "lib" / "libvulkan_lvp.so", root / "share" / "vulkan" / "icd.d" / "lvp_icd.json"
    for each in (library, file):
        each.parent.mkdir(parents=True)
    library.write_bytes(b"driver")
    file.write_text(json.dumps({"ICD": {"api_version": "1.4.305", "library_path": "libvulkan_lvp.so"}}))
    starts = []
    for _ in range(2):
        copy = software_gpu._description(file, root, tmp_path)
        environment = software_gpu._environment(copy, root, tmp_path)
        starts.append((environment, copy.stat().st_mtime_ns, list(vulkan_drivers(environment))))
        os.utime(copy, (1, 1))  # what is not written again keeps its time
    assert starts[0][0] == starts[1][0]
    assert starts[1][1] == 1_000_000_000
    assert starts[0][2] == starts[1][2] != []
    assert "6 bytes" in starts[0][2][0]
    assert Path(starts[0][0]["XDG_RUNTIME_DIR"]).is_dir()
