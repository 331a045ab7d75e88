"""Plans that compare the CPU with the WebGPU provider, by measurement on both.

Where there is no GPU a software adapter runs the provider; it is slower than the CPU that it runs on.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny

from edgespec.runtimes.devices import find_device
from edgespec.runtimes.probe import probe_device
from edgespec.setup.home import ModelHome

pytestmark = pytest.mark.webgpu


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if "XDG_RUNTIME_DIR" not in os.environ:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    tiny.write_gguf(tmp_path / "tiny.gguf", tiny.random_weights())
    return tmp_path


def run(*command: object) -> str:
    words = [sys.executable, "-m", "edgespec", *map(str, command), "--offline"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cpu_is_preferred_to_a_software_adapter_that_was_measured(home: Path) -> None:
    model, drafter = f"{home / 'tiny.gguf'}:fp32", f"{home / 'tiny.gguf'}:int4"
    prepared = ModelHome(home / "home", offline=True)
    prepared.resolve(model, "gpu")
    prepared.resolve(drafter)
    document = json.loads(run("plan", model, "--drafter", drafter, "--json"))
    options: list[dict[str, Any]] = document["options"]
    there = [option for option in options if option["target_device"] == "webgpu"]
    if not find_device("webgpu").is_software:
        assert {option["basis"] for option in there} == {"measured"}
        return
    assert (document["target_device"], document["basis"]) == ("cpu", "measured")
    measured = [option for option in there if option["basis"] == "measured"]
    assert {option["schedule"] for option in measured} >= {"plain", "serial", "pipelined"}
    for option in measured:
        assert "webgpu is emulated in software" in option["reason"]
        assert "a pass takes the target " in option["reason"] or not option["context_length"]
        assert option["tokens_per_second"] < document["tokens_per_second"]
    # Text drafts alone, nothing has to be named, and the emulator is not looked at again.
    chosen = json.loads(run("chat", model, "--drafter", "none", "--prompt", "the", "--max-tokens", "3", "--json"))
    assert chosen["stats"]["target_device"] == "cpu"


def test_adapter_that_is_named_is_planned_on(home: Path) -> None:
    model = f"{home / 'tiny.gguf'}:fp32"
    document = json.loads(run("plan", model, "--drafter", "none", "--device", "webgpu", "--json"))
    assert (document["target_device"], document["basis"]) == ("webgpu", "measured")


def test_probe_foresees_what_a_pass_takes_to_start_and_to_read() -> None:
    probe = probe_device(find_device("webgpu"), "gpu")
    assert probe.start_s > 0
    assert probe.bytes_per_s > 0
    assert set(probe.rows) == {1, 2, 4, 8}
