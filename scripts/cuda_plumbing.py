"""What NVIDIA's provider does with a model folder, seen without a GPU: its own library over imitations of CUDA's.

    python -m pip download --no-deps onnxruntime-gpu
    python scripts/cuda_plumbing.py MODEL onnxruntime_gpu-….whl

The provider's library is the real one. Those that it rests on (libcudart, libcublas, libcudnn, …) are made on the
spot, by gcc, with every function that it asks for: memory is the host's, a copy copies, and a kernel does nothing.
So this tells whether a session takes edgespec's options, which nodes run where, what is copied between host and
device within a pass, and whether passes are bound as they should be. It tells nothing of what is computed and of
no speed. For a folder in the gpu form, on Linux.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import onnx

from edgespec.manifest import read_manifest
from edgespec.opening import ModelFolder
from edgespec.runtimes import cuda, devices
from edgespec.runtimes.devices import Device, with_arena
from edgespec.runtimes.onnx import OnnxDecoder
from edgespec.runtimes.placement import placed_on, placement

_PROVIDER = "onnxruntime/capi/libonnxruntime_providers_cuda.so"
_ROUND = "size_t s = (n + 255) / 256 * 256; *p = aligned_alloc(256, s); return 0;"
# Of the functions that have to do something; all others return 0. cudaDeviceProp is that of CUDA 13.
_DOING = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *n) { *n = 1; return 0; }",
    "cudaGetDevice": "int cudaGetDevice(int *n) { *n = 0; return 0; }",
    "cudaMalloc": f"int cudaMalloc(void **p, size_t n) {{ {_ROUND} }}",
    "cudaMallocHost": f"int cudaMallocHost(void **p, size_t n) {{ {_ROUND} }}",
    "cudaHostAlloc": f"int cudaHostAlloc(void **p, size_t n, unsigned f) {{ {_ROUND} }}",
    "cudaFree": "int cudaFree(void *p) { free(p); return 0; }",
    "cudaFreeHost": "int cudaFreeHost(void *p) { free(p); return 0; }",
    "cudaMemcpy": "int cudaMemcpy(void *d, void *s, size_t n, int k) { memcpy(d, s, n); return 0; }",
    "cudaMemcpyAsync": (
        "int cudaMemcpyAsync(void *d, void *s, size_t n, int k, void *t) { memcpy(d, s, n); return 0; }"
    ),
    "cudaMemGetInfo": "int cudaMemGetInfo(size_t *f, size_t *t) { *f = *t = 80ul << 30; return 0; }",
    "cudaDriverGetVersion": "int cudaDriverGetVersion(int *v) { *v = 13000; return 0; }",
    "cudaRuntimeGetVersion": "int cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }",
    "cudaGetErrorString": 'const char *cudaGetErrorString(int e) { return "imitated"; }',
    "cudaGetErrorName": 'const char *cudaGetErrorName(int e) { return "imitated"; }',
    "cudaStreamCreate": "int cudaStreamCreate(void **s) { *s = malloc(8); return 0; }",
    "cudaStreamCreateWithFlags": "int cudaStreamCreateWithFlags(void **s, int f) { *s = malloc(8); return 0; }",
    "cudaEventCreateWithFlags": "int cudaEventCreateWithFlags(void **s, int f) { *s = malloc(8); return 0; }",
    "cudaDeviceGetAttribute": (
        "int cudaDeviceGetAttribute(int *v, int a, int d)"
        " { *v = a == 75 ? 9 : a == 76 ? 0 : a == 10 ? 32 : 128; return 0; }"
    ),
    "cudaGetDeviceProperties": (
        'int cudaGetDeviceProperties(char *p, int d) { memset(p, 0, 1000); strcpy(p, "imitated");'
        " *(size_t *)(p + 288) = 80ul << 30; *(size_t *)(p + 296) = 49152; int *i = (int *)p;"
        " i[76] = 65536; i[77] = 32; i[80] = i[81] = i[82] = 1024; i[83] = 64; i[84] = 2147483647;"
        " i[85] = i[86] = 65535; i[90] = 9; i[96] = 132; return 0; }"
    ),
    "cublasCreate_v2": "int cublasCreate_v2(void **h) { *h = malloc(64); return 0; }",
    "cublasLtCreate": "int cublasLtCreate(void **h) { *h = malloc(64); return 0; }",
    "cudnnCreate": "int cudnnCreate(void **h) { *h = malloc(64); return 0; }",
    "cudnnGetVersion": "size_t cudnnGetVersion() { return 91000; }",
    "__cudaRegisterFatBinary": "void **__cudaRegisterFatBinary(void *p) { return malloc(64); }",
}


def imitate(provider: Path, folder: Path) -> None:
    """Write a library for each that the provider needs, with what it asks of it."""
    asked: dict[str, set[str]] = defaultdict(set)
    for symbol in _printed("nm", "-D", "--undefined-only", str(provider)).split():
        name, _, library = symbol.partition("@")
        if library.startswith("libcu") or (name.startswith("cu") and not library):
            asked[library or "libcuda.so.1"].add(name)
    needed = re.findall(r"NEEDED.*\[(libcu[^]]+)\]", _printed("readelf", "-d", str(provider)))
    # It loads cuDNN by itself, and asks for its functions by name.
    by_name = set(re.findall(rb"(?<=\0)(cudnn[A-Z][A-Za-z0-9_]+)(?=\0)", provider.read_bytes()))
    asked["libcudnn.so.9"] = {name.decode() for name in by_name} | {"cudnnCreate", "cudnnGetVersion"}
    for library in {*needed, *asked}:
        lines = [_function(name) for name in sorted(asked[library])]
        _build(folder, library, ["#include <stdlib.h>", "#include <string.h>", *lines])


def _function(name: str) -> str:
    known = next((each for each in _DOING if name == each or re.fullmatch(rf"{each}_v\d+", name)), None)
    return _DOING[known].replace(f"{known}(", f"{name}(", 1) if known else f"long {name}() {{ return 0; }}"


def _build(folder: Path, library: str, lines: list[str]) -> None:
    source, versions = folder / f"{library}.c", folder / f"{library}.map"
    source.write_text("\n".join(lines))
    versions.write_text(f"{library} {{ global: *; }};")
    options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{library},--version-script={versions}"]
    _printed("gcc", str(source), "-o", str(folder / library), *options)


def _printed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def look(model: Path, wheel: Path, workplace: Path) -> None:
    """In a process that finds the imitations: open a folder, run passes, print what was seen."""
    sys.path.insert(0, str(wheel))
    vars(devices)["_FLAVOURS"] = ("onnxruntime-gpu",)  # the one that is looked at, whatever is installed
    ort = devices.import_onnxruntime()
    device = Device(
        "cuda", cuda.PROVIDER, "cuda", options=cuda.OPTIONS, entries=cuda.ENTRIES, host_threads=cuda.HOST_THREADS
    )
    device = with_arena(device, 1 << 30)
    folder = ModelFolder(model, read_manifest(model))
    print(f"onnxruntime-gpu {ort.__version__}, {device.options}, {device.entries}")
    decoder = _opened(folder, device)
    for provider, nodes in placement(decoder._passes._session).items():
        print(f"  {provider}: {', '.join(f'{num} {kind}' for kind, num in nodes.most_common())}")
    print(f"  copies within a pass: {_num_copies(ort, folder, device, workplace)}")
    tokens = np.arange(300, dtype=np.int32) % decoder.vocab_size
    for num_tokens, num_last in ((5, 1), (8, 4), (9, 1), (300, 3), (7, 2)):
        assert decoder.logits(tokens[:num_tokens], num_last).shape == (num_last, decoder.vocab_size)
        if folder.manifest.signature.best:
            assert decoder.argmax(tokens[:num_tokens], num_last).ids.shape == (num_last,)
    print("  passes ran, kernels did nothing")


def _opened(folder: ModelFolder, device: Device) -> OnnxDecoder:
    class Unproved(OnnxDecoder):
        """Takes what is computed as it is: nothing."""

        def _sound_chunk(self, device: Device) -> int:
            return 256

        def _chooses_soundly(self, device: Device) -> bool:
            return True

    return Unproved(*folder, device)


def _num_copies(ort: object, folder: ModelFolder, device: Device, workplace: Path) -> int:
    options = ort.SessionOptions()  # type: ignore[attr-defined]
    how = placed_on(options, device)
    options.log_severity_level = 4
    options.optimized_model_filepath = str(workplace / "optimized.onnx")
    graph = str(folder.folder / folder.manifest.graph)
    ort.InferenceSession(graph, options, **how)  # type: ignore[attr-defined]
    optimized = onnx.load(workplace / "optimized.onnx", load_external_data=False).graph
    return sum(node.op_type.startswith("Memcpy") for node in optimized.node)


def main() -> int:
    if len(sys.argv) == 4:
        look(*map(Path, sys.argv[1:]))
        return 0
    model, wheel = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="cuda-plumbing-") as name:
        folder = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "wheel")
        imitate(folder / "wheel" / _PROVIDER, folder)
        command = [sys.executable, __file__, model, str(folder / "wheel"), str(folder)]
        return subprocess.run(command, env={**os.environ, "LD_LIBRARY_PATH": str(folder)}).returncode


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: cuda_plumbing.py MODEL onnxruntime_gpu.whl")
    sys.exit(main())
