"""What a model is called apart from who published it and how it is stored, to compare models by their names."""

import re

from edgespec.system.split_files import whole_name

_STORED = re.compile(r"[-._](gguf|i?q\d[a-z0-9]*(_[a-z0-9]+)*|bf16|f16|f32|fp16|fp32|int4|int8)$")


def plain_name(name: str) -> str:
    """The plain name of a hub id, a file or a folder, in small letters.

    Example: unsloth/Qwen3-4B-GGUF:Q4_K_M, Qwen/Qwen3-4B and Qwen3-4B.Q4_1.gguf are all qwen3-4b.
    """
    file = whole_name(name.replace("\\", "/").rstrip("/").rpartition("/")[2])
    plain = file.partition(":")[0].lower().removesuffix(".gguf").removesuffix(".safetensors")
    while (shorter := _STORED.sub("", plain)) != plain:
        plain = shorter
    return plain
