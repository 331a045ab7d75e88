"""Stubs of the libraries that NVIDIA's provider needs. They count memory and handles, and can refuse them.

Device memory is host memory, a copy copies, and a kernel does nothing. Built by gcc, on Linux.
"""

import ctypes
import re
import subprocess
from collections import defaultdict
from pathlib import Path

# The functions that have to do something; all others return 0. Further arguments are ignored, as the calling
# convention allows. The fields of cudaDeviceProp are where CUDA 13 has them.
_STUBS = {
    "cudaGetDeviceCount": "(int *n) { *n = 1; return 0; }",
    "cudaGetDevice": "(int *n) { *n = 0; return 0; }",
    "cudaMemGetInfo": "(size_t *f, size_t *t) { *f = *t = 80ul << 30; return 0; }",
    "cudaDeviceGetAttribute": "(int *v, int a) { *v = a == 75 ? 9 : a == 76 ? 0 : a == 10 ? 32 : 128; return 0; }",
    "cudaGetDeviceProperties": (
        '(char *p) { memset(p, 0, 1000); strcpy(p, "imitated");'
        " *(size_t *)(p + 288) = 80ul << 30; *(size_t *)(p + 296) = 49152; int *i = (int *)p;"
        " i[76] = 65536; i[77] = 32; i[80] = i[81] = i[82] = 1024; i[83] = 64; i[84] = 2147483647;"
        " i[85] = i[86] = 65535; i[90] = 9; i[96] = 132; return 0; }"
    ),
    "cudnnGetVersion": "() { return 91000; }",
    "__cudaRegisterFatBinary": "() { return (long)malloc(64); }",
    # The size lies in front of what is taken.
    "cudaMalloc": (
        "(char **p, size_t n) { n = (n + 255) / 256 * 256; if (n > edgespec_free) return 2;"
        " edgespec_free -= n; edgespec_used += n; *p = aligned_alloc(256, n + 256); *(size_t *)*p = n; *p += 256;"
        " return 0; }"
    ),
    "cudaFree": (
        "(char *p) { if (p) { size_t n = *(size_t *)(p - 256); edgespec_free += n; edgespec_used -= n;"
        " free(p - 256); } return 0; }"
    ),
    **dict.fromkeys(
        ("cudaMallocHost", "cudaHostAlloc"),
        "(void **p, size_t n) { *p = aligned_alloc(256, (n + 255) / 256 * 256); return 0; }",
    ),
    "cudaFreeHost": "(void *p) { free(p); return 0; }",
    **dict.fromkeys(
        ("cudaMemcpy", "cudaMemcpyAsync"), "(void *d, void *s, size_t n) { memcpy(d, s, n); return 0; }"
    ),
    # A recording that a replay starts; kernels do nothing in either.
    "cudaStreamEndCapture": (
        "(void *s, void **g) { if (edgespec_refuses) { *g = 0; return 901; } *g = malloc(8); return 0; }"
    ),
    "cudaGraphInstantiate": "(void **e) { edgespec_handles++; *e = malloc(8); return 0; }",
    "cudaGraphDestroy": "(void *g) { free(g); return 0; }",
    "cudaGraphExecDestroy": "(void *e) { edgespec_handles--; free(e); return 0; }",
    "cudaGraphLaunch": "() { edgespec_launches++; return 0; }",
    **dict.fromkeys(("cudaDriverGetVersion", "cudaRuntimeGetVersion"), "(int *v) { *v = 13000; return 0; }"),
    # As CUDA and cuBLAS word these.
    "cudaGetErrorString": '(int error) { return (long)(error == 2 ? "out of memory" : "imitated"); }',
    "cudaGetErrorName": '() { return (long)"imitated"; }',
    "cublasGetStatusString": (
        '(int error) { return (long)(error == 3 ? "the resource allocation failed" : "imitated"); }'
    ),
    "cublasGetStatusName": '() { return (long)"imitated"; }',
    **dict.fromkeys(
        ("cudaStreamCreate", "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags"),
        "(void **s) { *s = malloc(8); return 0; }",
    ),
    "cublasCreate": (
        "(void **h) { if (edgespec_refuses) return 3; edgespec_handles++; *h = malloc(64); return 0; }"
    ),
    **dict.fromkeys(("cublasLtCreate", "cudnnCreate"), "(void **h) { *h = malloc(64); return 0; }"),
}
# Counted in each library for itself: libcudart has memory and recordings, libcublas handles.
_STATE = (
    "size_t edgespec_free = 80ul << 30, edgespec_used; int edgespec_handles, edgespec_launches, edgespec_refuses;"
)


def build_stubs(provider: Path, folder: Path) -> None:
    """Build each library that the provider needs, with the functions that it imports from it."""
    imported: dict[str, set[str]] = defaultdict(set)
    for symbol in _run("nm", "-D", "--undefined-only", str(provider)).split():
        name, _, library = symbol.partition("@")
        if library.startswith("libcu") or (name.startswith("cu") and not library):
            imported[library or "libcuda.so.1"].add(name)
    needed = re.findall(r"NEEDED.*\[(libcu[^]]+)\]", _run("readelf", "-d", str(provider)))
    # The provider loads cuDNN itself, and looks its functions up by name.
    by_name = set(re.findall(rb"(?<=\0)(cudnn[A-Z][A-Za-z0-9_]+)(?=\0)", provider.read_bytes()))
    imported["libcudnn.so.9"] = {name.decode() for name in by_name} | {"cudnnCreate", "cudnnGetVersion"}
    for library in {*needed, *imported}:
        _build(folder, library, [_stub(name) for name in sorted(imported[library])])


def _stub(name: str) -> str:
    return f"long {name}{_STUBS.get(re.sub(r'_v[0-9]+$', '', name), '() { return 0; }')}"


def _build(folder: Path, library: str, functions: list[str]) -> None:
    source, versions = folder / f"{library}.c", folder / f"{library}.map"
    source.write_text("\n".join(["#include <stdlib.h>", "#include <string.h>", _STATE, *functions]))
    versions.write_text(f"{library} {{ global: *; }};")
    options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{library},--version-script={versions}"]
    _run("gcc", str(source), "-o", str(folder / library), *options)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class StubGpu:
    """What the stubs count, and what they refuse."""

    def __init__(self) -> None:
        cudart, cublas = (ctypes.CDLL(f"{name}.so.13") for name in ("libcudart", "libcublas"))
        self._free = ctypes.c_size_t.in_dll(cudart, "edgespec_free")
        self._used = ctypes.c_size_t.in_dll(cudart, "edgespec_used")
        self._handles = ctypes.c_int.in_dll(cublas, "edgespec_handles")
        self._refuses = ctypes.c_int.in_dll(cublas, "edgespec_refuses")
        self._recordings = ctypes.c_int.in_dll(cudart, "edgespec_handles")
        self._launches = ctypes.c_int.in_dll(cudart, "edgespec_launches")
        self._refuses_recordings = ctypes.c_int.in_dll(cudart, "edgespec_refuses")

    @property
    def used(self) -> int:
        return self._used.value

    @property
    def handles(self) -> int:
        return self._handles.value

    @property
    def recordings(self) -> int:
        """CUDA graphs that are held."""
        return self._recordings.value

    @property
    def launches(self) -> int:
        """How often CUDA graphs were started."""
        return self._launches.value

    def refuse(self, *, memory: bool = False, handles: bool = False, recordings: bool = False) -> None:
        self._refuses_recordings.value = recordings
        self._free.value = 0 if memory else 80 << 30
        self._refuses.value = handles
