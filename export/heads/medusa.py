"""Heads with a vocabulary head for each token of a draft: Medusa (Cai et al., arXiv:2401.10774) and Hydra (Ankner
et al., arXiv:2402.05109).

Medusa is read as its authors save it, a list of heads, each a sequence of blocks and a matrix, and as vLLM does.
The first block of Hydra's head i reads i + 1 embeddings of the target too.
"""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import onnx_ir as ir

from edgespec.errors import SourceError
from edgespec.export.heads.head_source import Dialect, HeadPlan, HeadSource
from edgespec.export.heads.head_tensors import Reader, count_names, require_hidden_size
from edgespec.export.heads.step_graphs import Step, StepWriter, plan_steps, recognizer, without_prefixes
from edgespec.export.heads.vocabulary import fit_vocabulary, require_same_rows
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor
from edgespec.types import TokenIds


def _plan_medusa(source: HeadSource, target: LoadedSource) -> HeadPlan:
    reader = Reader(source := without_prefixes(source))
    hidden = target.config.hidden_size
    is_vllm = "blocks.0.layers.0.weight" in source.tensors
    num_heads = count_names(source, r"blocks\.(\d+)\..*" if is_vllm else r"(\d+)\.0\.linear\.weight")
    tensors: dict[str, StoredTensor] = {}
    heads: list[StoredTensor] = []
    num_blocks = []
    has_biases = any(name.endswith(".bias") for name in source.tensors)
    for i in range(num_heads):
        block, head = (
            ("blocks.{}.layers.{}", "lm_heads.{}.weight") if is_vllm else ("{}.{}.linear", "{}.{}.weight")
        )
        pattern = rf"blocks\.{i}\.layers\.(\d+)\.weight" if is_vllm else rf"{i}\.(\d+)\.linear\.weight"
        num_blocks.append(count_names(source, pattern))
        for k in range(num_blocks[-1]):
            name = block.format(i, k)
            require_hidden_size(source, target, source.tensors[f"{name}.weight"].columns)
            tensors[f"{i}.{k}"] = reader.take(f"{name}.weight", hidden, hidden)
            if has_biases:
                tensors[f"{i}.{k}_bias"] = reader.take(f"{name}.bias", 1, hidden)
        own = head.format(i, num_blocks[-1])
        own = "lm_heads.0.weight" if own not in source.tensors and source.settings.get("original_lm_head") else own
        heads.append(reader.take(own, columns=hidden))
    tokens = _medusa_tokens(source, heads, target)
    tensors |= {f"{i}.head": head for i, head in enumerate(heads)}
    reader.require_all_taken("Medusa", r"\d+\.|blocks\.|lm_heads\.")
    steps = [Step(hidden, hidden, f"{i}.head", partial(_medusa_step, i, num)) for i, num in enumerate(num_blocks)]
    return plan_steps("medusa", target, steps, tensors, tokens=tokens)


def _medusa_step(
    i: int, num_blocks: int, writer: StepWriter, input_ids: ir.Value, hidden: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Residual blocks on the target's hidden state, the state of all steps."""
    x = hidden
    for block in range(num_blocks):
        x = writer.op("Add", x, writer.silu(writer.product(f"{i}.{block}", x)))
    return x, hidden


def _medusa_tokens(source: HeadSource, heads: list[StoredTensor], target: LoadedSource) -> TokenIds | None:
    """The tokens of the rows of trimmed heads, which are brought into their order."""
    if "token_map" not in source.integers:
        return fit_vocabulary(source, heads, target)
    require_same_rows(source, heads)
    tokens = source.integers["token_map"].values()
    order = np.argsort(tokens)
    # Heads of another size are whole, and the list says which of their rows to keep.
    rows = order if heads[0].rows == len(tokens) else tokens[order]
    if not (
        len(np.unique(tokens)) == len(tokens) and tokens.min() >= 0 and tokens.max() < target.config.vocab_size
    ):
        raise SourceError(
            f"{source.path}: its token_map is not a list of the target's tokens; the file is damaged"
        )
    if heads[0].rows <= rows.max():
        raise SourceError(
            f"{source.path}: its token_map names row {rows.max()} of a vocabulary head with {heads[0].rows}; the "
            "file is damaged"
        )
    heads[:] = [replace(head, rows=len(rows), row_order=rows.astype(np.intp)) for head in heads]
    return tokens[order].astype(np.int32)


def _plan_hydra(source: HeadSource, target: LoadedSource) -> HeadPlan:
    reader = Reader(source := without_prefixes(source))
    hidden = target.config.hidden_size
    if any(name.startswith("prefix_embeding_layer.") for name in source.tensors):
        raise SourceError(
            f"{source.path} is a Hydra head with a prefix layer that attends to the text (Hydra++), which is not "
            "read; give one with hydra_head_arch mlp"
        )
    num_heads = count_names(source, r"hydra_mlp\.(\d+)\.0\.linear\.weight")
    tensors = {"embedding": target.tensors["embedding"]}
    heads: list[StoredTensor] = []
    num_blocks = []
    has_biases = any(re.fullmatch(r"hydra_lm_head\.\d+\.bias", name) for name in source.tensors)
    for i in range(num_heads):
        num_blocks.append(count_names(source, rf"hydra_mlp\.{i}\.(\d+)\.linear\.weight"))
        for k in range(num_blocks[-1]):
            columns = hidden * (i + 2) if k == 0 else hidden
            parts = [("linear", f"{i}.{k}"), *([("res_connection", f"{i}.residual")] if k == 0 else [])]
            for part, role in parts:
                name = f"hydra_mlp.{i}.{k}.{part}"
                tensors[role] = reader.take(f"{name}.weight", hidden, columns)
                tensors[f"{role}_bias"] = reader.take(f"{name}.bias", 1, hidden)
        heads.append(reader.take(f"hydra_lm_head.{i}.weight", columns=hidden))
        if has_biases:
            rows = heads[-1].rows
            bias = reader.take(f"hydra_lm_head.{i}.bias", 1, rows)
            tensors[f"{i}.head_bias"] = replace(bias, rows=min(rows, target.config.vocab_size), columns=1)
    tokens = fit_vocabulary(source, heads, target)
    tensors |= {f"{i}.head": head for i, head in enumerate(heads)}
    reader.require_all_taken("Hydra", r"hydra_mlp\.|hydra_lm_head\.")
    steps = [
        Step(hidden * (i + 1), hidden * (i + 2), f"{i}.head", partial(_hydra_step, i, num))
        for i, num in enumerate(num_blocks)
    ]
    layer = _hydra_layer(source, target.config.num_layers)
    return plan_steps("hydra", target, steps, tensors, tokens=tokens, borrowed=("embedding",), layer=layer)


def _hydra_step(
    i: int, num_blocks: int, writer: StepWriter, input_ids: ir.Value, hidden: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Blocks on the hidden state and the embeddings of all tokens since.

    All of these, one after the other, are the state. The first block projects what it adds to as well.
    """
    state = writer.op("Concat", hidden, writer.rows("embedding", input_ids), axis=-1)
    active = writer.silu(writer.product(f"{i}.0", state))
    x = writer.op("Add", writer.product(f"{i}.residual", state), active)
    for block in range(1, num_blocks):
        x = writer.op("Add", x, writer.silu(writer.product(f"{i}.{block}", x)))
    return x, state


def _hydra_layer(source: HeadSource, num_layers: int) -> int | None:
    """The layer that a head reads: hidden_state_offset counts back from the state after the final norm."""
    offset = source.settings.get("hidden_state_offset", 0)
    if type(offset) is not int or not 0 <= offset < num_layers:
        raise SourceError(
            f"{source.settings.path}: hidden_state_offset is {offset!r}, wanted 0 to {num_layers - 1}, since the "
            f"target has {num_layers} layers"
        )
    return num_layers - 1 - offset if offset else None


HYDRA_DIALECT = Dialect(name="Hydra", recognizes=recognizer(r"hydra_mlp\.0\.0\.linear\.weight"), plan=_plan_hydra)
MEDUSA_DIALECT = Dialect(
    name="Medusa", recognizes=recognizer(r"0\.0\.linear\.weight|blocks\.0\.layers\.0\.weight"), plan=_plan_medusa
)
