"""Published heads that have a graph for each token of a draft: Medusa, Hydra, MLP and LSTM speculators."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import sqrt

import numpy as np
import onnx_ir as ir

from edgespec.errors import SourceError
from edgespec.export.heads.head_plan import Dialect, HeadPlan
from edgespec.export.heads.head_source import HeadSource
from edgespec.export.heads.head_tensors import count_names, fit_vocabulary, take_any, take_tensor
from edgespec.export.heads.roles import require_hidden_size
from edgespec.export.heads.step_graphs import (
    Mixing,
    Step,
    hydra_step,
    lstm_step,
    medusa_step,
    mlp_step,
    write_steps,
)
from edgespec.export.precision import Rule
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Head, KVCache, Manifest
from edgespec.types import TokenIds

_MAX_STEPS = 32
_NO_CACHE = KVCache(num_layers=0, num_kv_heads=1, head_dim=1)
# Names before those of the tensors: of the module that held the head where it was saved.
_PREFIXES = ("medusa_head.", "medusa_heads.", "hydra_head.", "speculator.")


def _file(i: int) -> str:
    return f"step_{i}.onnx"


def _without_prefixes(source: HeadSource) -> HeadSource:
    def short(name: str) -> str:
        return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)

    return replace(
        source,
        tensors={short(name): tensor for name, tensor in source.tensors.items()},
        integers={short(name): found for name, found in source.integers.items()},
    )


def _plan(
    name: str,
    method: str,
    target: LoadedSource,
    steps: list[Step],
    tensors: Mapping[str, StoredTensor],
    *,
    num_steps: int | None = None,
    tokens: TokenIds | None = None,
    borrowed: tuple[str, ...] = (),
) -> HeadPlan:
    """num_steps: The steps of a draft, where the last graph serves several."""
    files = [step.file for step in steps]
    files += files[-1:] * ((num_steps or len(files)) - len(files))

    def write(
        manifest: Manifest, roles: Mapping[str, StoredTensor], weights: WeightsFile, rule: Rule
    ) -> dict[str, ir.Model]:
        return write_steps(steps, roles, weights, rule)

    return HeadPlan(
        dialect=name,
        head=Head(
            method=method,
            kind="steps",
            target_layers=(target.config.num_layers,),
            target_hidden_size=target.config.hidden_size,
            state_size=steps[0].width,
            step_graphs=tuple(files),
        ),
        kv_cache=_NO_CACHE,
        tensors=tensors,
        write_graphs=write,
        borrowed=borrowed,
        tokens=tokens,
        vocabulary_heads=tuple(role for role in tensors if role.endswith(("head", "head_bias"))),
        graph=files[0],
    )


def _is_named(source: HeadSource, *patterns: str) -> bool:
    names = _without_prefixes(source).tensors
    return all(any(re.fullmatch(pattern, name) for name in names) for pattern in patterns)


# Medusa, as its authors save it (a list of heads, each a sequence of blocks and a matrix), and as vLLM does.


def _plan_medusa(source: HeadSource, target: LoadedSource) -> HeadPlan:
    source = _without_prefixes(source)
    hidden = target.config.hidden_size
    is_vllm = "blocks.0.layers.0.weight" in source.tensors
    num_heads = count_names(source, r"blocks\.(\d+)\..*" if is_vllm else r"(\d+)\.0\.linear\.weight")
    tensors: dict[str, StoredTensor] = {}
    heads: list[StoredTensor] = []
    num_blocks = []
    for i in range(num_heads):
        block, head = (
            ("blocks.{}.layers.{}", "lm_heads.{}.weight") if is_vllm else ("{}.{}.linear", "{}.{}.weight")
        )
        pattern = rf"blocks\.{i}\.layers\.(\d+)\.weight" if is_vllm else rf"{i}\.(\d+)\.linear\.weight"
        num_blocks.append(count_names(source, pattern))
        for k in range(num_blocks[-1]):
            name = block.format(i, k)
            require_hidden_size(source, target, source.tensors[f"{name}.weight"].columns)
            tensors[f"{i}.{k}"] = take_tensor(source, f"{name}.weight", hidden, hidden)
            if f"{name}.bias" in source.tensors:
                tensors[f"{i}.{k}_bias"] = take_tensor(source, f"{name}.bias", 1, hidden)
        own = head.format(i, num_blocks[-1])
        own = "lm_heads.0.weight" if own not in source.tensors and source.settings.get("original_lm_head") else own
        rows = source.tensors[own].rows if own in source.tensors else target.config.vocab_size
        heads.append(take_tensor(source, own, rows, hidden))
    tokens = _medusa_tokens(source, heads, target)
    tensors |= {f"{i}.head": head for i, head in enumerate(heads)}
    steps = [
        Step(file=_file(i), width=hidden, next_width=hidden, head=f"{i}.head", body=medusa_step(i, num_blocks[i]))
        for i in range(num_heads)
    ]
    return _plan("Medusa", "medusa", target, steps, tensors, tokens=tokens)


def _medusa_tokens(source: HeadSource, heads: list[StoredTensor], target: LoadedSource) -> TokenIds | None:
    """The tokens of the rows of trimmed heads, which are brought into their order."""
    if "token_map" not in source.integers:
        return fit_vocabulary(source, heads, target)
    tokens = source.integers["token_map"].values()
    order = np.argsort(tokens)
    # Heads of another size are whole, and the list says which of their rows to keep.
    rows = order if heads[0].rows == len(tokens) else tokens[order]
    if not (
        len(np.unique(tokens)) == len(tokens) and tokens.min() >= 0 and tokens.max() < target.config.vocab_size
    ):
        raise SourceError(f"{source.path}: its token_map is no list of the target's tokens; the file is damaged")
    if heads[0].rows <= rows.max():
        raise SourceError(
            f"{source.path}: its token_map names row {rows.max()} of a vocabulary head with {heads[0].rows}; the "
            "file is damaged"
        )
    heads[:] = [replace(head, rows=len(rows), row_order=rows.astype(np.intp)) for head in heads]
    return tokens[order].astype(np.int32)


# Hydra, whose first block of head i reads i + 1 embeddings of the target.


def _plan_hydra(source: HeadSource, target: LoadedSource) -> HeadPlan:
    source = _without_prefixes(source)
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
    for i in range(num_heads):
        num_blocks.append(count_names(source, rf"hydra_mlp\.{i}\.(\d+)\.linear\.weight"))
        for k in range(num_blocks[-1]):
            columns = hidden * (i + 2) if k == 0 else hidden
            parts = [("linear", f"{i}.{k}"), *([("res_connection", f"{i}.residual")] if k == 0 else [])]
            for part, role in parts:
                name = f"hydra_mlp.{i}.{k}.{part}"
                tensors[role] = take_tensor(source, f"{name}.weight", hidden, columns)
                tensors[f"{role}_bias"] = take_tensor(source, f"{name}.bias", 1, hidden)
        head = source.tensors.get(f"hydra_lm_head.{i}.weight")
        rows = target.config.vocab_size if head is None else head.rows
        heads.append(take_tensor(source, f"hydra_lm_head.{i}.weight", rows, hidden))
        if (bias := source.tensors.get(f"hydra_lm_head.{i}.bias")) is not None:
            num_rows = min(bias.columns, target.config.vocab_size)
            tensors[f"{i}.head_bias"] = replace(bias, rows=num_rows, columns=1)
    tokens = fit_vocabulary(source, heads, target)
    tensors |= {f"{i}.head": head for i, head in enumerate(heads)}
    steps = [
        Step(
            file=_file(i),
            width=hidden * (i + 1),
            next_width=hidden * (i + 2),
            head=f"{i}.head",
            body=hydra_step(i, num_blocks[i]),
        )
        for i in range(num_heads)
    ]
    return _plan("Hydra", "hydra", target, steps, tensors, tokens=tokens, borrowed=("embedding",))


# MLP speculators (IBM, Snowflake), whose names have one number, or two where their parts are sequences of one.


def _unnested(source: HeadSource) -> HeadSource:
    """With names of one number; raises SourceError: a part is a sequence of several."""
    source = _without_prefixes(source)
    several = [name for name in source.tensors if re.fullmatch(r"(emb|proj|ln)\.\d+\.[1-9]\d*\.\w+", name)]
    if several:
        raise SourceError(
            f"{source.path} has tensor {several[0]}: speculators whose parts have several layers are not read; "
            "give one with a single emb_dim, proj_dim and inner_dim"
        )
    names = {re.sub(r"^(emb|proj|ln)\.(\d+)\.0\.", r"\1.\2.", name): name for name in source.tensors}
    return replace(source, tensors={new: source.tensors[name] for new, name in names.items()})


def _num_steps(source: HeadSource) -> tuple[int, int]:
    """The steps that a head was trained for, and those that it drafts; raises SourceError."""
    trained = source.settings.count("n_predict")
    drafted = source.settings.count("num_lookahead_tokens", trained)
    if not max(trained, drafted) <= _MAX_STEPS:
        raise SourceError(
            f"{source.settings.path} drafts {max(trained, drafted)} tokens, at most {_MAX_STEPS} are read"
        )
    return trained, drafted


def _alpha(num_trained: int, size: int) -> float:
    """Weight of an embedding over that of the state, which is half of the whole after num_trained steps."""
    state: float = 0.5 ** (0.5 / num_trained)
    return sqrt((1 - state**2) * (size / 2)) / state


def _plan_mlp(source: HeadSource, target: LoadedSource) -> HeadPlan:
    source = _unnested(source)
    hidden, size = target.config.hidden_size, take_any(source, "proj.0.weight").rows
    require_hidden_size(source, target, take_any(source, "proj.0.weight").columns)
    trained, drafted = _num_steps(source)
    is_tied = bool(source.settings.get("tie_weights"))
    # Of tied steps the first and the second have projections of their own; the second serves the others too.
    num_graphs = min(drafted, 2) if is_tied else min(drafted, trained)
    tensors: dict[str, StoredTensor] = {}
    heads: list[StoredTensor] = []
    steps = []
    for i in range(num_graphs):
        own = 0 if is_tied else i
        width = hidden if i == 0 else size
        tensors[f"{i}.proj"] = take_tensor(source, f"proj.{i}.weight", size, width)
        rows = take_any(source, f"emb.{own}.weight").rows
        tensors[f"{own}.embedding"] = take_tensor(source, f"emb.{own}.weight", rows, size)
        tensors[f"{own}.norm"] = take_tensor(source, f"ln.{own}.weight", 1, size)
        tensors[f"{own}.norm_bias"] = take_tensor(source, f"ln.{own}.bias", 1, size)
        if own == len(heads):
            rows = take_any(source, f"head.{own}.weight").rows
            heads.append(take_tensor(source, f"head.{own}.weight", rows, size))
        scales = i == 0 and bool(source.settings.get("scale_input"))
        mixing = Mixing(
            projection=f"{i}.proj",
            embedding=f"{own}.embedding",
            norm=f"{own}.norm",
            alpha=_alpha(trained, size),
            scales_input=scales,
        )
        steps.append(
            Step(file=_file(i), width=width, next_width=size, head=f"{own}.head", body=mlp_step(mixing, width))
        )
    tokens = fit_vocabulary(source, heads, target)
    tensors |= {f"{i}.head": head for i, head in enumerate(heads)}
    num_steps = drafted if is_tied else num_graphs
    return _plan("MLP speculator", "mlp_speculator", target, steps, tensors, num_steps=num_steps, tokens=tokens)


def _plan_lstm(source: HeadSource, target: LoadedSource) -> HeadPlan:
    source = _without_prefixes(source)
    if "input_emb.0.weight" in source.tensors:
        raise SourceError(
            f"{source.path} has an embedding for each gate, which is not read; give one with tie_lstm_embs"
        )
    hidden, size = target.config.hidden_size, take_any(source, "projs.0.weight").rows // 4
    require_hidden_size(source, target, take_any(source, "projs.0.weight").columns)
    trained, drafted = _num_steps(source)
    rows = take_any(source, "forget_emb.0.weight").rows
    tensors = {
        "0.proj": take_tensor(source, "projs.0.weight", 4 * size, hidden),
        "1.proj": take_tensor(source, "projs.1.weight", 4 * size, size),
        "embedding": take_tensor(source, "forget_emb.0.weight", rows, size),
    }
    for role, name in (("norm", "cell_ln"), ("state_norm", "state_ln")):
        tensors[role] = take_tensor(source, f"{name}.0.weight", 1, size)
        tensors[f"{role}_bias"] = take_tensor(source, f"{name}.0.bias", 1, size)
    heads = [take_tensor(source, "head.0.weight", take_any(source, "head.0.weight").rows, size)]
    tokens = fit_vocabulary(source, heads, target)
    tensors["head"] = heads[0]
    steps = []
    for i in range(min(drafted, 2)):
        scales = i == 0 and bool(source.settings.get("scale_input"))
        mixing = Mixing(
            projection=f"{i}.proj",
            embedding="embedding",
            norm="norm",
            alpha=_alpha(trained, size),
            scales_input=scales,
        )
        width = hidden if i == 0 else 2 * size
        body = lstm_step(mixing, width, size, is_first=i == 0)
        steps.append(Step(file=_file(i), width=width, next_width=2 * size, head="head", body=body))
    return _plan("LSTM speculator", "mlp_speculator", target, steps, tensors, num_steps=drafted, tokens=tokens)


def _recognizer(*patterns: str) -> "partial[bool]":
    return partial(_recognizes, patterns)


def _recognizes(patterns: tuple[str, ...], source: HeadSource) -> bool:
    return _is_named(source, *patterns)


STEP_DIALECTS: tuple[Dialect, ...] = (
    Dialect(name="Hydra", recognizes=_recognizer(r"hydra_mlp\.0\.0\.linear\.weight"), plan=_plan_hydra),
    Dialect(
        name="LSTM speculator",
        recognizes=_recognizer(r"forget_emb\.0\.weight", r"projs\.0\.weight"),
        plan=_plan_lstm,
    ),
    Dialect(
        name="MLP speculator",
        recognizes=_recognizer(r"emb\.0\.(0\.)?weight", r"proj\.0\.(0\.)?weight", r"head\.0\.weight"),
        plan=_plan_mlp,
    ),
    Dialect(
        name="Medusa",
        recognizes=_recognizer(r"0\.0\.linear\.weight|blocks\.0\.layers\.0\.weight"),
        plan=_plan_medusa,
    ),
)
