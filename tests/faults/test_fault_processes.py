"""Faults of whole processes: forks, signals, and a session that runs on another device than asked."""

import os
import subprocess
import sys
import time
from pathlib import Path

import onnxruntime
import psutil
import pytest

from edgespec import DeviceUnavailable
from edgespec.manifest import read_manifest
from edgespec.runtimes.devices import Device
from edgespec.runtimes.onnx import OnnxDecoder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_thread_stays")]  # a module of many models or processes


# F22: forks


FORKED = """
import os, sys
from edgespec import EdgeSpecError, load

engine = load(sys.argv[1], drafter=sys.argv[2], draft_length=2, schedule="pipelined", num_threads=2)
whole = engine.generate("the in", max_tokens=12).token_ids
stream = engine.stream("the in", max_tokens=12)
made = [next(stream)]
conversation = engine.chat()
child = os.fork()
if child == 0:
    refused = 0
    for ask in (
        lambda: engine.generate("the in", max_tokens=3),
        lambda: next(stream),
        lambda: engine.plain().generate("the in"),
        lambda: conversation.say("the in"),
        lambda: engine.count("the in"),
    ):
        try:
            ask()
        except EdgeSpecError as error:
            refused += "of which this one is a fork" in str(error) and "'spawn'" in str(error)
    with load(sys.argv[1], drafter="none") as own:
        refused += own.generate("the in", max_tokens=12).token_ids == whole
    engine.close()
    sys.exit(refused)
_, status = os.waitpid(child, 0)
made += stream
assert tuple(token for chunk in made for token in chunk.token_ids) == whole
assert engine.generate("the in", max_tokens=12).token_ids == whole
engine.close()
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which Windows lacks")
def test_a_fork_is_told_to_load_its_own_and_its_parent_goes_on(tiny_model: Path, tiny_drafter: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(tiny_model), str(tiny_drafter)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("6\n", "", 0)


# F23: signals while a model is loaded, and while it answers

BUSY = {
    "import": """
class Slow:
    def find_spec(self, name, *arguments):
        if name == "edgespec.cli.chat":
            print("busy", flush=True)
            for _ in range(6000): time.sleep(0.01)  # a signal between print and one long sleep ends no sleep
sys.meta_path.insert(0, Slow())
""",
    "load": """
import edgespec.runtimes.session as session
def hang(graph, device, content=None, *, cancel, **options):
    print("busy", flush=True)
    while not cancel.is_set: time.sleep(0.01)
    cancel.require_unset()
session.load_graph = hang
""",
    "template": """
import edgespec.text.chat_template as template
def hang(*arguments):
    print("busy", flush=True)
    for _ in range(6000): time.sleep(0.01)
template.ask_bounded = hang
""",
    "answer": """
import edgespec.runtimes.passes as passes
run = passes.Passes.run
def slow(self, *arguments, **named):
    print("busy", flush=True); time.sleep(0.3)
    return run(self, *arguments, **named)
passes.Passes.run = slow
""",
    "check": """
import edgespec.setup.open_model as open_model, edgespec.runtimes.passes as passes
from edgespec.runtimes.devices import Device, find_device
init, run = passes.Passes.__init__, passes.Passes.run
def on_cpu(self, graph, manifest, device, **options):
    init(self, graph, manifest, find_device("cpu"), **options)
def hang(self, *arguments, **named):
    print("busy", flush=True)
    while not self._options.terminate: time.sleep(0.01)
    return run(self, *arguments, **named)
passes.Passes.__init__, passes.Passes.run = on_cpu, hang
decoder = open_model.OnnxDecoder
gpu = Device("gpu", "GpuExecutionProvider", "gpu")
open_model._decoder_class = lambda *given, **named: lambda folder, manifest, device, **options: decoder(
    folder, manifest, gpu, **options)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
@pytest.mark.parametrize("moment", BUSY)
def test_a_signal_ends_the_command_with_its_code(
    tiny_model: Path, tmp_path: Path, number: str, code: int, moment: str
) -> None:
    import signal

    # A shell's background jobs ignore Ctrl-C, and with them this test.
    heeded = "import signal, sys, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{heeded}\n{BUSY[moment]}\nfrom edgespec.__main__ import main\nsys.exit(main())"
    command = ["chat", str(tiny_model), "--prompt", "the", "--max-tokens", "600", "--drafter", "none"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "EDGESPEC_HOME": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != b"busy\n":
            assert process.poll() is None
        inner = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(getattr(signal, number))
        started = time.monotonic()
        try:
            _, error = process.communicate(timeout=120)
        finally:
            process.kill()
    # Before the command is there, other signals than Ctrl-C end Python itself.
    assert process.returncode in ((code, 128 - code) if moment == "import" else (code,))
    assert time.monotonic() - started < 60
    assert b"Traceback" not in error
    _, alive = psutil.wait_procs(inner, timeout=60)
    assert alive == []


# F25: a provider that was asked for and does not run the model


def test_a_session_that_silently_runs_elsewhere_is_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime opens the model on the CPU, and says that all is as it was asked for."""
    real = onnxruntime.InferenceSession

    def lying(path: str, options: object, **how: object) -> object:
        session = real(path, options, providers=["CPUExecutionProvider"])
        session.get_providers = lambda: ["WebGpuExecutionProvider", "CPUExecutionProvider"]
        return session

    monkeypatch.setattr(onnxruntime, "InferenceSession", lying)
    manifest = read_manifest(tiny_model)
    with pytest.raises(
        DeviceUnavailable, match=r"none of .*model\.onnx runs on WebGpuExecution.*on CPU"
    ) as refused:
        OnnxDecoder(tiny_model, manifest, Device("webgpu", "WebGpuExecutionProvider", "cpu"))
    assert refused.value.exit_code == 4
