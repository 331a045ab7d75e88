"""Another size of the L2 cache, for programs that ask the C library for it, as ONNX Runtime does on Linux."""

import os
import subprocess
from pathlib import Path

_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
long sysconf(int name) {
    if (name == _SC_LEVEL2_CACHE_SIZE) return L2_BYTES;
    return ((long (*)(int))dlsym(RTLD_NEXT, "sysconf"))(name);
}
"""


def with_l2(num_bytes: int, folder: Path) -> dict[str, str]:
    """An environment in which programs see an L2 cache of a size; a library is compiled into the folder."""
    (folder / "l2.c").write_text(_SOURCE)
    library = folder / "l2.so"
    command = ["cc", "-shared", "-fPIC", "-O1", f"-DL2_BYTES={num_bytes}L", "-o", library, folder / "l2.c", "-ldl"]
    subprocess.run(command, check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}
