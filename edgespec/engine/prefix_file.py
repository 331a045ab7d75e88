"""The keys and values of a text that a target has read, as a file: a later session need not read it again.

The file is numpy's npz with the tokens, the values, and the key of all that the values depend on: the model, the
device, ONNX Runtime and the processor. Under another key it is not used. Its checksums are those of a zip archive.
"""

import stat
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from edgespec.decoding.decoder import Cache, Decoder
from edgespec.errors import EdgeSpecError, ModelError, UsageError
from edgespec.manifest.caches import KVCache
from edgespec.system.arguments import require_path
from edgespec.system.disk import explain_write_errors, replacing, require_disk_space
from edgespec.types import TokenIds

_OTHER_BYTES = 1 << 20  # of a file, beside keys and values and four bytes a token
_RESERVE_BYTES = 1 << 30  # of the disk that stay free


def write_prefix(path: str | Path, decoder: Decoder) -> int:
    """Write what a decoder holds, in a file that only its owner may read; as Engine.save_prefix does."""
    path = require_path("path", path)
    key, held = _require_key(decoder)
    tokens, values = held.read_prefix()
    if not len(tokens):
        raise UsageError("the model has read nothing yet that could be saved; ask it something first")
    try:
        require_disk_space(path.parent, values.nbytes + _OTHER_BYTES, _RESERVE_BYTES)
        with explain_write_errors(path.parent, values.nbytes), replacing(path) as file:
            np.savez(file, key=np.array(key), tokens=tokens, values=values)
    except OSError as error:
        raise EdgeSpecError(f"cannot write {path}: {error.strerror or error}") from None
    return len(tokens)


def read_prefix(path: str | Path, decoder: Decoder, cache: KVCache) -> TokenIds:
    """Let a decoder hold what a file has; returns the tokens, and raises as Engine.load_prefix does."""
    path = require_path("path", path)
    key, held = _require_key(decoder)
    try:
        largest = decoder.context_length * (cache.bytes_per_token + 4) + _OTHER_BYTES
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a device has no end
            raise UsageError(f"{path} is not a file; wanted one that save_prefix wrote")
        if status.st_size > largest:
            raise UsageError(f"{path} holds more than the context of {decoder.context_length} tokens")
        with path.open("rb") as file:
            _require_stored(file)
            with np.load(file, allow_pickle=False) as found:
                if str(found["key"]) != key:
                    raise UsageError(f"{path} was saved with another model, device, processor or version")
                tokens: TokenIds = found["tokens"]
                values: npt.NDArray[Any] = found["values"]
        _require_whole(tokens, values, decoder, cache)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (EdgeSpecError, MemoryError):
        raise
    # Damaged bytes raise errors of many kinds in zipfile, tokenize and numpy.
    except Exception as error:
        raise UsageError(f"{path} is damaged ({error})") from None
    held.fill_prefix(tokens, values)
    return tokens


def _require_stored(file: BinaryIO) -> None:
    """Raises ValueError: The archive has compressed parts, which may become far larger than the file."""
    with zipfile.ZipFile(file) as archive:
        if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
            raise ValueError("a part of it is compressed")
    file.seek(0)


def find_key(decoder: Decoder) -> str | None:
    """All that a file depends on beside its tokens; None where the decoder cannot give its keys and values."""
    return decoder.cache.prefix_key if decoder.cache else None


def _require_key(decoder: Decoder) -> tuple[str, Cache]:
    cache, key = decoder.cache, find_key(decoder)
    if cache is None or key is None:
        raise ModelError(
            "the KV cache of this model cannot be saved: that takes a model without recurrent layers that "
            "edgespec exported, on the CPU, without drafting heads or trees of drafts; load such a model with "
            "device='cpu', drafter='suffix'"
        )
    return key, cache


def _require_whole(tokens: Any, values: npt.NDArray[Any], decoder: Decoder, cache: KVCache) -> None:
    num_tokens = len(tokens)
    if num_tokens > decoder.context_length:
        raise UsageError(
            f"the saved text has {num_tokens} tokens, more than the context of {decoder.context_length}"
        )
    shape = (1, 1, num_tokens, cache.numbers_per_token)
    if tokens.dtype != np.int32 or tokens.ndim != 1 or not num_tokens:
        raise ValueError("its tokens are none of this model")
    if not (tokens.min() >= 0 and tokens.max() < decoder.vocab_size):
        raise ValueError("its tokens are none of this model")
    if values.shape != shape or values.dtype != np.dtype(cache.dtype):
        raise ValueError(f"its values have the shape {values.shape}; wanted {shape}")
