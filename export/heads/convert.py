"""From a drafting head and its target's source to a model folder, whole or not at all."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from edgespec.errors import SourceError, UsageError, VocabularyMismatch
from edgespec.export.folder_size import written_bytes
from edgespec.export.heads.dialects import find_dialect
from edgespec.export.heads.head_source import HeadPlan, HeadSource
from edgespec.export.layout import VOCAB_SUBSET
from edgespec.export.options import Trimming, frequent_tokens
from edgespec.export.output import ExportProgress, atomic_folder, finish, hash_files, require_absent, write_text
from edgespec.export.plan import ExportCost, estimate
from edgespec.export.precision import BLOCK_SIZES, FORMS, PRECISIONS, Rule
from edgespec.export.settings import translate_unusual
from edgespec.export.sources import LoadedSource
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Manifest, Origin, Signature
from edgespec.system.console import show_progress
from edgespec.text.tokenizer import open_tokenizer, vocabulary_sha256
from edgespec.types import Report

# Of a head's tokenizer; published ones differ in a few tokens that were added later.
_DIFFERING_TOKENS = 0.01
_REASON = "a head is small, and what it would lose in 4 bits costs drafts; quantised weights of the target stay"
_LARGE_REASON = "its large layer loses nothing in 4 bits; the rest has 8, and quantised weights of the target stay"
# Weights of a single layer from which it is in 4 bits (docs/log/training.md).
_LARGE_LAYER = 20_000_000


@dataclass(frozen=True, kw_only=True)
class PlannedHead:
    """A head and all that decides what its folder will hold.

    dialect: The name of the format that it was read from, for messages.
    """

    source: HeadSource
    dialect: str
    target: LoadedSource
    plan: HeadPlan
    rule: Rule
    form: str
    cost: ExportCost


def plan_head(
    target: LoadedSource,
    head: HeadSource,
    precision: str = "auto",
    *,
    form: str = "cpu",
    block_size: int = BLOCK_SIZES[0],
    trimming: Trimming = Trimming(),  # noqa: B008  frozen
) -> PlannedHead:
    """Recognise a head and plan its export.

    Args:
        target: The model that it drafts for, whose embedding and vocabulary head it may use.
        precision: One of PRECISIONS but w8a16; auto is int8, but for quantised weights of the target, and in the
            cpu form for a large layer that is the only one.
        trimming: The number of tokens to trim a vocabulary head to, and the text in which they are counted.

    Raises:
        UsageError: The precision or the form does not exist for heads, or the vocabulary head is trimmed already.
        SourceError: The head is damaged, of an unknown kind, or was made for another target.
        VocabularyMismatch: It was made for another vocabulary.
    """
    if precision not in PRECISIONS or precision == "w8a16":
        known = ", ".join(each for each in PRECISIONS if each != "w8a16")
        raise UsageError(f"a drafting head has no precision '{precision}'; choose one of {known}")
    if form not in FORMS or form == "npu":
        raise UsageError(
            f"a drafting head has no {form} form, since its graphs take any number of tokens; choose "
            "--drafter-device cpu or gpu"
        )
    _require_tokenizer(head, target)
    with translate_unusual(head.path):
        dialect = find_dialect(head)
        plan = _trim(dialect.plan(head, target), target, trimming)
    num_weights = sum(tensor.rows * tensor.columns for tensor in plan.tensors.values())
    chosen = "int8" if precision == "auto" else precision
    has_small_layers = precision == "auto" and form == "cpu" and _has_one_large_layer(plan)
    rule = Rule(
        chosen,
        block_size,
        is_half=form == "gpu" and chosen != "fp32",
        num_weights=num_weights,
        keeps_blocks=precision == "auto",
        has_fused_products=form == "cpu",
        has_small_layers=has_small_layers,
    )
    tensors = list(plan.tensors.values())
    manifest = _describe("", target, plan, rule, form)
    cost = estimate(
        head.path.name,
        chosen,
        num_weights,
        sum(tensor.num_bytes for tensor in tensors),
        is_blocks=any(tensor.is_blocks for tensor in tensors),
        form=form,
        write_bytes=written_bytes(
            lambda read, weights: plan.write_graphs(manifest, read, weights, rule), plan.tensors, target.vocabulary
        ),
    )
    if precision == "auto":
        cost = replace(cost, reason=_LARGE_REASON if has_small_layers else _REASON)
    return PlannedHead(
        source=head, dialect=dialect.name, target=target, plan=plan, rule=rule, form=form, cost=cost
    )


def _has_one_large_layer(plan: HeadPlan) -> bool:
    """True if a recurrent head has one layer, which is large."""
    layer = [tensor for role, tensor in plan.tensors.items() if role[:1].isdigit()]
    is_one = plan.head.kind == "recurrent" and plan.kv_cache.num_layers == 1
    return is_one and sum(each.rows * each.columns for each in layer) >= _LARGE_LAYER


def _require_tokenizer(head: HeadSource, target: LoadedSource) -> None:
    """Raises VocabularyMismatch: The head's folder holds a tokenizer, and it is not the target's."""
    path = head.path / "tokenizer.json"
    if not path.is_file():
        return
    own = open_tokenizer(path, SourceError, "fetch it again").get_vocab()
    other = Tokenizer.from_str(target.vocabulary.tokenizer_json).get_vocab()
    pieces = {token: piece for piece, token in other.items()}
    differing = sum(pieces.get(token, piece) != piece for piece, token in own.items())
    if differing > _DIFFERING_TOKENS * len(own):
        raise VocabularyMismatch(
            f"{head.path} has a tokenizer of which {differing} of {len(own)} tokens are others than those of "
            f"{target.source.name}; it was made for another model: name a head that was made for this one"
        )


def export_head(
    planned: PlannedHead,
    output: Path,
    name: str,
    *,
    origin: Origin = Origin(),  # noqa: B008  frozen
    report: Report = lambda line: None,
) -> Manifest:
    """Convert a head into a model folder at output, which appears complete or not at all.

    Args:
        name: The name of the head in the manifest.
        origin: Where it was fetched from, for the manifest.

    Raises:
        UsageError: output exists already.
        SourceError: The file is damaged.
        DiskFull: There is no room for the folder.
    """
    require_absent(output)
    plan, target, rule, cost = planned.plan, planned.target, planned.rule, planned.cost
    with atomic_folder(output, cost.write_bytes, report) as folder:
        layer = ", its layer in 4 bits" if rule.has_small_layers else ""
        report(f"writing {planned.dialect} head {name} in {rule.precision} precision{layer}")
        if plan.borrowed:
            report(f"it has no {' and no '.join(plan.borrowed)} of its own; it gets the target's")
        manifest = _describe(name, target, plan, rule, planned.form)
        tokenizer = Tokenizer.from_str(target.vocabulary.tokenizer_json)
        source = planned.source.source().fetched_from(origin)
        manifest = replace(manifest, source=source, vocab_sha256=vocabulary_sha256(tokenizer))
        write_text(folder, target.vocabulary, manifest)
        if plan.tokens is not None:
            np.save(folder / VOCAB_SUBSET, plan.tokens)
        with WeightsFile(folder / manifest.weights, ExportProgress(cost.write_bytes, report)) as weights:
            graphs = plan.write_graphs(manifest, plan.tensors, weights, rule)
        for file, graph in graphs.items():
            ir.save(graph, folder / file)
        manifest = hash_files(folder, manifest, report)
        show_progress("")
        return finish(folder, manifest)


def _trim(plan: HeadPlan, target: LoadedSource, trimming: Trimming) -> HeadPlan:
    """The plan with its vocabulary head trimmed to the most frequent tokens of a text, if that is asked for."""
    if trimming.num_tokens is None:
        return plan
    if plan.tokens is not None or not plan.vocabulary_heads:
        share = f"trimmed already, to {len(plan.tokens)} tokens" if plan.tokens is not None else "of a few tokens"
        raise UsageError(f"this head's logits are {share}; leave out --vocab-subset")
    trimming.require_valid()
    heads = {role: plan.tensors[role] for role in plan.vocabulary_heads if role in plan.tensors}
    if "head" in plan.vocabulary_heads:  # the embedding, where it has no other
        heads.setdefault("head", plan.tensors["embedding"])
    num_rows = min(head.rows for head in heads.values())
    always = target.vocabulary.eos_token_ids
    tokens = frequent_tokens(target.vocabulary.tokenizer_json, trimming, always, num_rows)
    rows = tokens.astype(np.intp)
    for role, head in heads.items():
        heads[role] = replace(
            head, rows=len(rows), row_order=rows if head.row_order is None else head.row_order[rows]
        )
    return replace(plan, tensors={**plan.tensors, **heads}, tokens=tokens)


def _describe(name: str, target: LoadedSource, plan: HeadPlan, rule: Rule, form: str) -> Manifest:
    """The manifest of a head's folder, without hashes: of its files, its vocabulary and its source."""
    vocabulary = target.vocabulary
    return Manifest(
        name=name,
        architecture=plan.head.method,
        precision=rule.precision,
        form=form,
        context_length=target.config.context_length,
        kv_cache=replace(plan.kv_cache, dtype="float16" if rule.is_half else "float32"),
        vocab_size=target.config.vocab_size,
        vocab_sha256="",
        **vocabulary.special_tokens,
        source=target.source,
        signature=Signature(),
        graph=plan.graph,
        tree_graph="model_tree.onnx" if plan.has_trees else None,
        chat_template="chat_template.jinja" if vocabulary.chat_template else None,
        head=plan.head,
        vocab_subset=VOCAB_SUBSET if plan.tokens is not None else None,
        sliding_window=plan.sliding_window,
    )
