"""The passes by which a device is checked while a model is opened: they end when the loading is cancelled."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from calls import decoder

from edgespec.errors import Cancelled, DeviceUnavailable, EdgeSpecError
from edgespec.manifest import read_manifest
from edgespec.runtimes import device_checks
from edgespec.runtimes.device_checks import DeviceChecks
from edgespec.runtimes.device_trial import DeviceTrial
from edgespec.runtimes.devices import Device
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.passes import Passes
from edgespec.runtimes.tree import OnnxTreeDecoder
from edgespec.system.cancel import Cancel

GPU = Device("gpu", "WebGpuExecutionProvider", "gpu")
DECODERS = [OnnxDecoder, OnnxTreeDecoder]


@pytest.fixture(autouse=True)
def no_saved_check(monkeypatch: pytest.MonkeyPatch, computed_by_the_cpu: None) -> None:
    monkeypatch.setattr(DeviceChecks, "read", lambda checks: None)


def replace_pass(monkeypatch: pytest.MonkeyPatch, before: Callable[[Passes], None]) -> None:
    really = Passes.run

    def run(self: Passes, *arguments: Any, **named: Any) -> Any:
        before(self)
        return really(self, *arguments, **named)

    monkeypatch.setattr(Passes, "run", run)


def opened_error(folder: Path, kind: Any, cancel: Cancel) -> tuple[Thread, list[BaseException]]:
    found: list[BaseException] = []

    def open_it() -> None:
        try:
            kind(folder, read_manifest(folder), GPU, cancel=cancel)
        except EdgeSpecError as error:
            found.append(error)

    thread = Thread(target=open_it, daemon=True)
    thread.start()
    return thread, found


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("nth", [1, 3, -1])
def test_a_cancelled_loading_ends_the_pass_that_runs(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, nth: int
) -> None:
    """The n-th pass of the check hangs until it is interrupted; -1 is the last one, of a tree if it runs any."""
    all_passes: list[Passes] = []
    if nth == -1:
        with monkeypatch.context() as patch:
            replace_pass(patch, all_passes.append)
            kind(tiny_model, read_manifest(tiny_model), GPU)
        nth = len(all_passes)
        assert nth > 3
    started, cancel, passes = Event(), Cancel(), list[Passes]()

    def hang(passing: Passes) -> None:
        passes.append(passing)
        if len(passes) == nth:
            started.set()
            while not passing._options.terminate:
                time.sleep(0.001)

    replace_pass(monkeypatch, hang)
    thread, found = opened_error(tiny_model, kind, cancel)
    assert started.wait(120)
    cancel.set()
    thread.join(120)
    assert not thread.is_alive()
    assert [type(error) for error in found] == [Cancelled]
    assert len(passes) == nth


@pytest.mark.parametrize("kind", DECODERS)
def test_no_pass_begins_once_the_loading_is_cancelled(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """Also where the interrupt comes between two passes, and the next one forgets it."""
    num_begun, cancel, begin = 0, Cancel(), Passes.begin

    def count(passing: Passes) -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 2:
            cancel.set()
            begin(passing)

    replace_pass(monkeypatch, count)
    thread, found = opened_error(tiny_model, kind, cancel)
    thread.join(120)
    assert [type(error) for error in found] == [Cancelled]
    assert num_begun == 2


def test_a_cancel_that_comes_later_disturbs_no_pass(tiny_model: Path) -> None:
    cancel = Cancel()
    opened = OnnxDecoder(tiny_model, read_manifest(tiny_model), GPU, cancel=cancel)
    cancel.set()
    tokens = device_checks.probe_tokens(opened.vocab_size, 9)
    assert (opened.logits(tokens, 1) == decoder(tiny_model, deterministic=False).logits(tokens, 1)).all()


@pytest.mark.parametrize(("quiet_s", "num_lines"), [(0.0, 1), (60.0, 0)])
@pytest.mark.parametrize("kind", DECODERS)
def test_a_check_that_takes_long_is_reported_once(
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: Any,
    quiet_s: float,
    num_lines: int,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(device_checks, "_QUIET_S", quiet_s)
    replace_pass(monkeypatch, lambda passing: time.sleep(0.002))
    kind(tiny_model, read_manifest(tiny_model), replace(GPU, name="webgpu"))
    lines = [line for line in caplog.messages if line.startswith("checking")]
    assert len(lines) == num_lines
    assert all("'webgpu' computes this model correctly, which is done once" in line for line in lines)


@pytest.mark.parametrize(("is_cancelled", "error"), [(False, DeviceUnavailable), (True, Cancelled)])
def test_passes_after_a_failed_recording_refuse_the_device_or_end_with_the_loading(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool, error: type[EdgeSpecError]
) -> None:
    cancel = Cancel()

    def fail_to_record(trial: DeviceTrial) -> None:
        monkeypatch.setattr(trial._passes, "graphs", SimpleNamespace(width=0))

    def fail(trial: DeviceTrial) -> None:
        if is_cancelled:
            cancel.set()
            trial._passes.run(np.zeros(1, np.int32), 0, 1)
        raise EdgeSpecError("the pass failed")

    monkeypatch.setattr(DeviceTrial, "run", fail_to_record)
    monkeypatch.setattr(DeviceTrial, "run_shapes", fail)
    with pytest.raises(error):
        OnnxDecoder(tiny_model, read_manifest(tiny_model), GPU, cancel=cancel)
