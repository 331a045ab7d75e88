"""What heads with a graph for each token of a draft have in common: names of tensors, and the plan of a folder."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import onnx_ir as ir

from edgespec.errors import SourceError
from edgespec.export.heads.head_plan import HeadPlan
from edgespec.export.heads.head_source import HeadSource
from edgespec.export.heads.step_graphs import Step, write_steps
from edgespec.export.precision import Rule
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Head, KVCache, Manifest
from edgespec.types import TokenIds

_NO_CACHE = KVCache(num_layers=0, num_kv_heads=1, head_dim=1)
# Names before those of the tensors: of the module that held the head where it was saved.
_PREFIXES = ("medusa_head.", "medusa_heads.", "hydra_head.", "speculator.")


def step_graph(i: int) -> str:
    """The file name of the graph of a step."""
    return f"model_step_{i}.onnx"


def without_prefixes(source: HeadSource) -> HeadSource:
    """A head whose names of tensors begin with their own module."""

    def short(name: str) -> str:
        return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)

    return replace(
        source,
        tensors={short(name): tensor for name, tensor in source.tensors.items()},
        integers={short(name): found for name, found in source.integers.items()},
    )


def plan_steps(
    name: str,
    method: str,
    target: LoadedSource,
    steps: list[Step],
    tensors: Mapping[str, StoredTensor],
    *,
    num_steps: int | None = None,
    tokens: TokenIds | None = None,
    borrowed: tuple[str, ...] = (),
    layer: int | None = None,
) -> HeadPlan:
    """The plan of a head.

    Args:
        num_steps: The steps of a draft, where the last graph serves several.
        layer: The layer of the target after which it reads; None for the state after the final norm.
    """
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
            target_layers=(target.config.num_layers if layer is None else layer,),
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


def require_all_used(source: HeadSource, tensors: Mapping[str, StoredTensor], pattern: str) -> None:
    """Raises SourceError: A tensor whose name has a pattern is in no graph, as where one before it is missing."""
    used = {tensor.name for tensor in tensors.values()}
    for name, tensor in source.tensors.items():
        if re.fullmatch(pattern, name) and tensor.name not in used:
            raise SourceError(
                f"{source.path} has tensor {name}, which is of no whole part of it: a tensor beside or "
                "before it is missing; fetch it again"
            )


def recognizer(*patterns: str) -> Callable[[HeadSource], bool]:
    """Whether a head has a tensor for each of some patterns of names."""

    def recognizes(source: HeadSource) -> bool:
        names = without_prefixes(source).tensors
        return all(any(re.fullmatch(pattern, name) for name in names) for pattern in patterns)

    return recognizes
