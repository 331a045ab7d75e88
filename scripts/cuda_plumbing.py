"""What NVIDIA's provider does with a model folder, seen without a GPU: its own library over stubs of CUDA's.

    python -m pip download --no-deps onnxruntime-gpu
    python scripts/cuda_plumbing.py MODEL onnxruntime_gpu-….whl

The provider's library is the real one. The libraries that it needs (libcudart, libcublas, libcudnn, …) are built
by gcc (cuda_stubs.py), with every function that it imports: device memory is host memory, a copy copies, and a
kernel does nothing. This shows whether a session accepts edgespec's options, which nodes run where, what is copied
between host and device within a pass, how much device memory is taken and given back, what the library says
when there is none left, and how many handles of cuBLAS threads make. It shows no results of kernels, and no speed.
For a folder in the gpu form, on Linux. The exit code is 1 if something is not as edgespec assumes.
"""

import gc
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, Unpack
from unittest.mock import patch

import numpy as np
import onnx
from cuda_stubs import StubGpu, build_stubs

from edgespec import load
from edgespec.decoding.decoder import BEST, Pass
from edgespec.decoding.tree import Tree
from edgespec.errors import EdgeSpecError
from edgespec.manifest import read_manifest
from edgespec.runtimes import cuda, cuda_graph, devices, session
from edgespec.runtimes.device_checks import DeviceChecks
from edgespec.runtimes.devices import Device, limit_arena
from edgespec.runtimes.node_placement import find_strays, read_node_placement
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.pass_shapes import PassShapes
from edgespec.runtimes.session import SessionOptions, session_settings
from edgespec.runtimes.tree import OnnxTreeDecoder
from edgespec.setup.open_model import ModelFolder, weights_size

_PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"


def inspect_provider(model: Path, wheel: Path, workplace: Path) -> int:
    """Open a model folder, run passes and print what was seen, in a process that finds the stubs."""
    sys.path.insert(0, str(wheel))
    vars(devices)["_BUILDS"] = ("onnxruntime-gpu",)  # whatever is installed
    ort = devices.import_onnxruntime()
    folder = ModelFolder(model, read_manifest(model))
    size = weights_size(folder)
    recording = limit_arena(cuda.CUDA, size.device_bytes + (1 << 30))
    device = replace(recording, records_passes=False)
    gpu = StubGpu()
    print(f"onnxruntime-gpu {ort.__version__}, {device.options}, {device.entries}")
    decoder = _open_unchecked(folder, device)
    for provider, nodes in read_node_placement(decoder._passes._session).items():
        print(f"  {provider}: {', '.join(f'{num} {kind}' for kind, num in nodes.most_common())}")
    found = Findings()
    for graph in filter(None, (folder.manifest.graph, folder.manifest.tree_graph)):
        found.equal(f"copies within a pass of {graph}", _count_copies(folder, graph, device, workplace), 0)
    found.about("weights", size.device_bytes, gpu.used, gpu.used / size.device_bytes)
    _run_passes(decoder, folder)
    print("  passes ran; kernels did nothing")
    _check_cache(found, gpu, decoder, folder)
    _check_threads(found, gpu, decoder)
    _check_shortage(found, gpu, decoder, folder, device)
    _run_tree(folder, device)
    del decoder
    _check_recordings(found, gpu, folder, recording)
    gc.collect()
    found.equal("bytes that are left after closing", gpu.used, 0)
    found.equal("recordings that are left after closing", gpu.recordings, 0)
    found.equal("bytes that an engine takes", _use_engine(gpu, model) > size.device_bytes, True)
    gc.collect()
    found.equal("bytes that are left after closing the engine", gpu.used, 0)
    return int(found.has_failed)


class Findings:
    """What was expected and what was found, printed; remembers whether they differed."""

    has_failed = False

    def equal(self, what: str, found: object, wanted: object) -> None:
        is_right = found == wanted
        self.has_failed |= not is_right
        print(f"  {what}: {found}" + ("" if is_right else f", WANTED {wanted}"))

    def about(self, what: str, foreseen: int, found: int, ratio: float) -> None:
        """Whether a figure is foreseen within a hundredth, beside what an arena rounds."""
        is_right = 0.99 < ratio < 1.01 or abs(found - foreseen) < 1 << 18
        self.has_failed |= not is_right
        print(f"  {what}: {found} bytes, foreseen {foreseen}" + ("" if is_right else ", WHICH IS WRONG"))


def _run_passes(decoder: OnnxDecoder, folder: ModelFolder) -> None:
    tokens = np.arange(300, dtype=np.int32) % decoder.vocab_size
    for num_tokens, num_last in ((5, 1), (8, 4), (9, 1), (300, 3), (7, 2)):
        assert decoder.logits(tokens[:num_tokens], num_last).shape == (num_last, decoder.vocab_size)
        if folder.manifest.signature.best:
            best = decoder.run(Pass(tokens[:num_tokens], num_last=num_last, wants=BEST)).best
            assert best is not None
            assert best.ids.shape == (num_last,)


def _check_cache(found: Findings, gpu: StubGpu, decoder: OnnxDecoder, folder: ModelFolder) -> None:
    """The cache is taken in steps, and what it has let go is given back by a later pass."""
    tokens = np.arange(600, dtype=np.int32) % decoder.vocab_size
    decoder.logits(tokens, 1)
    grown = gpu.used
    decoder.logits(tokens, 1)
    held = weights_size(folder).device_bytes + 1024 * folder.manifest.kv_cache.bytes_per_token
    # weights are foreseen within a hundredth
    found.equal("a longer cache lies beside the weights", gpu.used > 0.99 * held, True)
    found.equal("the shorter one is given back behind the next pass", gpu.used < grown, True)


def _check_threads(found: Findings, gpu: StubGpu, decoder: OnnxDecoder) -> None:
    """Each answer has a thread of its own; one pass of each."""
    before = gpu.handles
    for _ in range(3):
        thread = Thread(target=decoder.logits, args=(np.zeros(3, np.int32), 1))
        thread.start()
        thread.join()
    found.equal("handles of cuBLAS that three threads make", gpu.handles - before, 0)


def _check_shortage(
    found: Findings, gpu: StubGpu, decoder: OnnxDecoder, folder: ModelFolder, device: Device
) -> None:
    """A device without memory: in the words of the real library, and what edgespec makes of them."""

    def grow() -> None:
        decoder.logits(np.zeros(min(4000, decoder.context_length), np.int32), 1)

    def run_wide() -> None:  # wider than those before it, of which the arena has the memory, in the same cache
        decoder.logits(np.ones(min(1000, decoder.context_length), np.int32), 1)

    gpu.refuse(memory=True)
    found.equal("a pass without memory", _error_of(run_wide), "MemoryExhausted")
    found.equal("a cache without memory", _error_of(grow), "MemoryExhausted")
    found.equal("opening without memory", _error_of(lambda: _open_unchecked(folder, device)), "MemoryExhausted")
    gpu.refuse(handles=True)
    found.equal("opening without cuBLAS", _error_of(lambda: _open_unchecked(folder, device)), "MemoryExhausted")
    gpu.refuse()
    small = limit_arena(replace(device, options=cuda.CUDA.options), weights_size(folder).device_bytes + (1 << 16))
    found.equal(
        "an arena that is too small",
        _error_of(lambda: _run_passes(_open_unchecked(folder, small), folder)),
        "MemoryExhausted",
    )
    grow()
    print("  passes ran again")


def _check_recordings(found: Findings, gpu: StubGpu, folder: ModelFolder, device: Device) -> None:
    """Passes of a width are recorded for each cache, and replayed whichever thread asks."""

    class RecordingDecoder(OnnxDecoder):
        def _check(self, device: Device, checks: DeviceChecks) -> None:
            self.has_argmax, self.shapes = True, PassShapes((8,), (64,))
            if graphs := self._passes.graphs:
                graphs.width = 8

    def decode(decoder: OnnxDecoder, first: int, end: int) -> None:
        tokens = np.arange(end, dtype=np.int32) % decoder.vocab_size
        for length in range(first, end):
            decoder.run(Pass(tokens[:length], num_last=2, wants=BEST))

    def in_three_threads(decoder: OnnxDecoder) -> None:
        for _ in range(3):
            thread = Thread(target=decode, args=(decoder, 30, 40))
            thread.start()
            thread.join()

    with ExitStack() as stack:
        for name in ("are_close", "is_argmax_sound"):  # the stubs compute nothing
            stack.enter_context(patch.object(cuda_graph, name, lambda *rows: True))
        decoder = RecordingDecoder(*folder, device)
        decode(decoder, 20, 30)
        found.equal("recordings of a cache", gpu.recordings, 1)
        handles, launches = gpu.handles, gpu.launches
        in_three_threads(decoder)
        found.equal("replays of three threads", gpu.launches - launches, 30)
        found.equal("handles of cuBLAS that they make", gpu.handles - handles, 0)
        found.equal("recordings that they make", gpu.recordings, 1)
        fork = decoder.fork()
        decode(fork, 20, 30)
        in_three_threads(decoder)
        found.equal("recordings of two caches, of which one was made beside the other's", gpu.recordings, 3)
        decode(decoder, 505, 520)
        found.equal("recordings after a cache has grown", gpu.recordings, 4)
        for num_tokens in range(510, 520):
            decoder.logits(np.arange(num_tokens, dtype=np.int32) % decoder.vocab_size, 1)
        found.equal("recordings once whole rows are wanted too, one at a time", gpu.recordings, 5)
        gpu.refuse(recordings=True)
        fork.forget()
        decode(fork, 20, 30)
        gpu.refuse()
        found.equal("passes are recorded after a recording has failed", decoder._passes.is_recording, False)
        decode(decoder, 520, 530)
        print("  passes ran again")


def _run_tree(folder: ModelFolder, device: Device) -> None:
    """A pass over a tree of drafts behind a text, by the graph that takes a bias."""

    class UncheckedDecoder(OnnxTreeDecoder):
        def _check(self, device: Device, checks: DeviceChecks) -> None:
            self.has_argmax = True

    decoder = UncheckedDecoder(*folder, device)
    parents = (-1, 0, -1)
    given = Pass(np.arange(5, dtype=np.int32), Tree(np.arange(3, dtype=np.int32), parents=parents))
    rows = decoder.run(given).logits
    assert rows.shape == (len(parents) + 1, decoder.vocab_size)
    strays = find_strays(
        read_node_placement(decoder._passes._session), device, folder.manifest.kv_cache.num_layers
    )
    print(f"  a tree of drafts ran in one pass; {strays or 'nothing strays to the host'}")


def _use_engine(gpu: StubGpu, model: Path) -> int:
    """Load a model as a user does and ask for an answer, which is nonsense; the bytes that were held then."""
    with (
        patch.object(OnnxDecoder, "_check", lambda *arguments: None),
        load(model, device="cuda", drafter="none") as engine,
    ):
        with suppress(EdgeSpecError):  # logits that are no numbers
            engine.generate("Why is the sky blue?", max_tokens=4)
        return gpu.used


def _error_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:  # of any kind: it is what is looked at
        print(f"    {' '.join(str(error.__cause__ or error).split())[-150:]}")
        gc.collect()
        return type(error).__name__
    return "no error"


def _open_unchecked(folder: ModelFolder, device: Device) -> OnnxDecoder:
    class UncheckedDecoder(OnnxDecoder):
        """Skips the checks of what the device computes, as the stubs compute nothing."""

        def _check(self, device: Device, checks: DeviceChecks) -> None:
            self.has_argmax = True

    return UncheckedDecoder(*folder, device)


def _count_copies(folder: ModelFolder, graph: str, device: Device, workplace: Path) -> int:
    """Copies between host and device in a graph as it is run: cut at its end, and optimised by the library."""
    path, saved = folder.folder / graph, workplace / "optimized.onnx"

    @contextmanager
    def saving(device: Device, **options: Unpack[SessionOptions]) -> Iterator[tuple[Any, dict[str, Any]]]:
        with session_settings(device, **options) as (settings, how):
            settings.optimized_model_filepath = str(saved)
            yield settings, how

    with patch.object(session, "session_settings", saving):
        session.load_graph(path, device, session.fast_model(path, folder.manifest, device))
    nodes = onnx.load(saved, load_external_data=False).graph.node
    assert any(node.name == "rows.Slice" for node in nodes), "the graph that was cut"
    return sum(node.op_type.startswith("Memcpy") for node in nodes)


def main() -> int:
    if len(sys.argv) == 4:
        return inspect_provider(*map(Path, sys.argv[1:]))
    model, wheel = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="cuda-plumbing-") as name:
        folder = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "wheel")
        build_stubs(folder / "wheel" / _PROVIDER, folder)
        command = [sys.executable, __file__, model, str(folder / "wheel"), str(folder)]
        return subprocess.run(command, env={**os.environ, "LD_LIBRARY_PATH": str(folder)}).returncode


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: cuda_plumbing.py MODEL onnxruntime_gpu.whl")
    sys.exit(main())
