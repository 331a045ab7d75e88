"""Print a table of drafting heads of published shapes: their drafts beside the code of those who made the format.

    make heads                                  all of them, some twenty minutes
    make heads HEADS="MTP DFlash"               those whose kind or name has one of these words

Each head has the names, the settings and all the sizes of a published one (tests/support/published_heads.py), and
random weights. edgespec exports it in fp32 and drafts after a text; then again after a text that goes on with a
part of that draft. The reference, in PyTorch, is given the same text, the same hidden states and the same drafted
tokens: packages speculators (vLLM), dflash (Z Lab) and transformers, and a clone of deepseek-ai/DeepSpec. A line
has the largest difference of a logit over all drafts, or of a chance where the head states one; it should be
below 1e-4 of what logits spread by. Where it is not, the reference runs in double precision too, and the line says
how far edgespec and the reference's single precision are from that: a head that is no further than twice the
reference is as exact as its makers' code. Exits with 1 where one is further. A head takes up to 14 GB of memory
and minutes, and with --vocabulary N, which leaves it N of its tokens, half of that.
"""

import gc
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiny
from head_folders import random_features
from head_references import Floats, Reference, in_doubles, open_reference
from published_heads import PublishedHead, layers_of, published, shaped
from safetensors.numpy import save_file

from edgespec.decoding.decoder import Decoder, Pass
from edgespec.decoding.hidden_states import HiddenStates
from edgespec.export.heads.convert import PlannedHead, export_head, plan_head
from edgespec.export.heads.head_source import read_head
from edgespec.export.safetensors import read_tensors
from edgespec.export.sources import read_source
from edgespec.runtimes.devices import find_device
from edgespec.runtimes.heads import open_head
from edgespec.types import TokenIds, append

MOST, HIDDEN = 1e-4, -1e4  # logits that a head does not show are below the second
LINE = "{:12} {:42} {:28} {:44} {:8} {:>8} {:>7}"
NUM_DRAFTS, NUM_DRAFTED = 3, 5


class Case(NamedTuple):
    """kind: As it is named in docs/heads.md. reference: One of those of head_references."""

    kind: str
    name: str
    reference: str
    num_before: int = 40


CASES = (
    Case("EAGLE-3", "RedHatAI/Qwen3-8B-speculator.eagle3", "speculators"),
    Case("EAGLE-3", "AngelSlim/Qwen3-1.7B_eagle3", "speculators"),
    Case("EAGLE-3.1", "an EAGLE-3.1 head of SpecForge for Qwen3-30B-A3B", "speculators"),
    Case("P-EAGLE", "thyways/qwen3_8b_peagle_demo", "speculators"),
    Case("DFlash", "z-lab/Qwen3-4B-DFlash-b16", "dflash", 300),
    Case("DFlash", "z-lab/Qwen3.6-35B-A3B-DFlash", "dflash", 4200),
    Case("DFlash", "RedHatAI/Qwen3-8B-speculator.dflash", "speculators", 300),
    Case("DFlash", "deepseek-ai/dflash_qwen3_4b_block7", "deepspec", 300),
    Case("DFlash 2", "incoai/Qwen3.6-35B-A3B-DFlash2", "dflash", 2100),
    Case("DFlash 2", "a DFlash 2 head of speculators for Qwen3-8B", "speculators", 300),
    Case("DSpark", "deepseek-ai/dspark_qwen3_4b_block7", "deepspec", 300),
    Case("DSpark", "openbmb/MiniCPM5-2B-DSpark", "deepspec", 300),
    Case("DSpark", "RedHatAI/Qwen3-4B-speculator.dspark", "speculators", 2100),
    Case("DSpark", "rasyosef/Llama-3.2-1B-Instruct-DSpark", "speculators", 2100),
    Case("DSpark", "makora-ai/gemma4-26b-a4b-dspark", "speculators", 300),
    Case("DSpark", "LiquidAI/LFM2.5-1.2B-Instruct-DSpark", "speculators", 300),
    Case("MTP", "the MTP layer of Qwen/Qwen3.5-0.8B", "speculators"),
    Case("MTP", "the MTP layer of Qwen/Qwen3.5-4B", "speculators"),
    Case("MTP", "google/gemma-4-E2B-it-assistant", "transformers", 600),
    Case("MTP", "google/gemma-4-E4B-it-assistant", "transformers", 600),
)


class Apart(NamedTuple):
    """Largest differences of a logit or a chance, and the standard deviation of the logits.

    ours, theirs: Of edgespec and of the reference to the reference in double precision; none where found is small.
    """

    found: float
    spread: float
    ours: float | None = None
    theirs: float | None = None

    @property
    def is_wrong(self) -> bool:
        limit = MOST * max(1.0, self.spread)
        if self.ours is None or self.theirs is None:
            return self.found > limit
        return self.ours > max(limit, 2 * self.theirs)

    def __str__(self) -> str:
        return "" if self.ours is None else f"  beside doubles {self.ours:.1e}, the reference {self.theirs:.1e}"


class Draft(NamedTuple):
    """A draft after a text. rows: Logits, [num_tokens, num_columns]; chances: That the head states, or none."""

    text: TokenIds
    tokens: TokenIds
    rows: Floats
    chances: tuple[float, ...]


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--deepspec", type=Path, help="a clone of deepseek-ai/DeepSpec")
    parser.add_argument("--folder", type=Path, help="where files of some 10 GB are kept meanwhile")
    parser.add_argument("--vocabulary", type=int, help="cut the vocabulary to so many tokens")
    given = parser.parse_args()
    if given.deepspec:
        sys.path.insert(0, str(given.deepspec))
    known, wrong = {head.name: head for head in published()}, 0
    print(LINE.format("kind", "head", "shape", "parts", "beside", "apart", "spread"))
    for case in CASES:
        if given.words and not any(word in f"{case.kind} {case.name}" for word in given.words):
            continue
        head = cut(known[case.name], given.vocabulary) if given.vocabulary else known[case.name]
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            try:
                apart = compare(Path(folder), head, case)
            except ImportError as error:
                print(f"{case.kind:12} {head.name:42} not compared: {error}", flush=True)
                continue
        gc.collect()
        wrong += apart.is_wrong
        named = case.kind, head.name, shape(head), parts(head), case.reference
        print(LINE.format(*named, f"{apart.found:.1e}", f"{apart.spread:.2f}") + str(apart), flush=True)
    print(f"{wrong or 'none'} of the lines differ")
    return int(wrong > 0)


def cut(head: PublishedHead, size: int) -> PublishedHead:
    """The head with fewer tokens in its vocabulary and that of its target; all its other sizes stay."""
    hidden, whole, num_layers = head.target

    def settings(found: Any) -> Any:
        if isinstance(found, dict):
            return {
                key: min(each, size - 1) if key == "mask_token_id" else settings(each)
                for key, each in found.items()
            }
        return size if found == whole or (found == head.tokens and found > size) else found

    tokens = 0 if head.tokens >= size else head.tokens
    rows = {whole: size, head.tokens: tokens or size}
    shapes = {name: tuple(rows.get(length, length) for length in each) for name, each in head.shapes.items()}
    target = hidden, size, num_layers
    return replace(head, config=settings(head.config), shapes=shapes, target=target, tokens=tokens)


def shape(head: PublishedHead) -> str:
    """Numbers of a state, layers of the head, heads and their size, tokens."""
    inner = layers_of(head)
    heads = f"{inner['num_attention_heads']}/{inner['num_key_value_heads']}×{inner['head_dim']}"
    count = 1 if any("mtp." in name for name in head.shapes) else inner["num_hidden_layers"]
    return f"{inner['hidden_size']} {count}L {heads} {head.tokens or head.target[1]}"


def parts(head: PublishedHead) -> str:
    """What a head has beside its layers."""
    inner, own, names = (
        layers_of(head),
        {**head.config.get("dflash_config", {}), **head.config},
        " ".join(head.shapes),
    )
    window = inner.get("sliding_window") if "sliding_attention" in inner.get("layer_types", ()) else None
    found = {
        f"window {window} in {head.kinds}": window and head.kind == "block",
        f"block of {own.get('block_size')}": head.kind == "block",
        f"{head.num_drafted} drafted": head.num_drafted > 1,
        "Markov": "markov_w1" in names,
        "confidence": "confidence_head" in names,
        "selector": "candidate_selector" in names,
        "convolutions": "mlp_conv" in names,
        "mask": "mask_hidden" in names,
        "norms before fusing": "fc_norm.0" in names,
        "pairs": own.get("rope_is_neox_style") is False,
        "gates": "mtp." in names,
        "clusters": "centroids" in names,
        "trimmed": head.tokens,
    }
    return ", ".join(part for part, is_there in found.items() if is_there)


def compare(folder: Path, head: PublishedHead, case: Case) -> Apart:
    """Drafts of a head beside those of its reference; where they are far apart, both beside double precision."""
    lent = write_head(folder, head)
    features = random_features(head.reads, head.target[0], case.num_before + 64)
    drafts = drafts_of(folder, head, features, case.num_before)

    def wanted() -> list[tuple[Floats, Floats]]:
        reference = open_reference(case.reference, folder / "head", layers_of(head), lent)
        return [expected(reference, draft, features) for draft in drafts]

    found, theirs = [(each.rows, np.array(each.chances)) for each in drafts], wanted()
    rows = theirs[-1][0]
    apart = Apart(largest(found, theirs), float(rows[rows > HIDDEN].std()))
    if not apart.is_wrong:
        return apart
    with in_doubles():
        exact = wanted()
    return apart._replace(ours=largest(found, exact), theirs=largest(theirs, exact))


def largest(found: list[tuple[Floats, Floats]], wanted: list[tuple[Floats, Floats]]) -> float:
    """The largest difference of a logit that is shown, or of a chance that both state, over all drafts."""
    apart = 0.0
    for (rows, chances), (others, other_chances) in zip(found, wanted, strict=True):
        shown = others > HIDDEN
        assert np.array_equal(shown, rows > HIDDEN)
        apart = max(apart, float(np.abs(rows - others)[shown].max()))
        if chances.size and other_chances.size:
            apart = max(apart, float(np.abs(chances - other_chances).max()))
    return apart


def expected(reference: Reference, draft: Draft, features: Floats) -> tuple[Floats, Floats]:
    """The rows and chances of the reference for the tokens that were drafted."""
    import torch

    known = torch.from_numpy(features[None, : len(draft.text) - 1]).to(torch.get_default_dtype())
    with torch.no_grad():
        rows, chances = reference(torch.from_numpy(draft.text[None]).long(), known, draft.tokens.tolist())
    return rows.numpy(), chances.numpy()


def draw(shapes: Mapping[str, tuple[int, ...]], seed: int, *, is_unscaled: bool = False) -> dict[str, Floats]:
    """Random weights. is_unscaled: Scores of attention are as queries and keys give them."""
    rng, made = np.random.default_rng(seed), {}
    for name, size in shapes.items():
        drawn, part = rng.standard_normal(size, np.float32), name.removesuffix(".weight").rpartition(".")[2]
        less = float("mtp." not in name)
        made[name] = less + 0.1 * drawn if "norm" in part else drawn * np.float32(size[-1] ** -0.5)
        if part in ("q_norm", "k_norm") and is_unscaled:  # or all attention would be to one token
            made[name] *= np.float32(size[-1] ** -0.25)
    return made


def write_head(folder: Path, head: PublishedHead) -> Path:
    """Write a head with random weights, and the file of what its target lends it, by role."""
    head.write(folder / "head")
    lists = {name: each.values() for name, each in read_head(folder / "head").integers.items()}
    own = {name: size for name, size in head.shapes.items() if name not in lists}
    is_unscaled = "backbone_hidden_size" in head.config
    save_file({**draw(own, 1, is_unscaled=is_unscaled), **lists}, folder / "head" / "model.safetensors")
    tiny.write_huggingface(folder / "target", tiny.random_weights())
    tensors = shaped(read_source(folder / "target"), head).tensors
    lent = {
        role: (each.rows, each.columns) if each.rows > 1 else (each.columns,) for role, each in tensors.items()
    }
    save_file(draw(lent, 2, is_unscaled=is_unscaled), folder / "lent.safetensors")
    return folder / "lent.safetensors"


def drafts_of(folder: Path, head: PublishedHead, features: Floats, num_before: int) -> list[Draft]:
    """Drafts of the exported head, each after the text before it, two tokens of that draft, and another one."""
    hidden, vocab_size, _ = head.target
    manifest = export_head(plan(folder, head, len(features)), folder / "out", "head")
    store = HiddenStates(head.reads, hidden)
    subset = np.arange(head.tokens, dtype=np.int32) if head.tokens else None
    opened = open_head(folder / "out", manifest, find_device("cpu"), store, subset)
    text = np.random.default_rng(3).integers(0, vocab_size, num_before).astype(np.int32)
    drafts = []
    for number in range(NUM_DRAFTS):
        store.put(0, text[:-1], features[: len(text) - 1])
        drafts.append(
            draft(opened, text, min(NUM_DRAFTED, head.num_drafted if head.num_drafted > 1 else NUM_DRAFTED))
        )
        drafts[-1] = drafts[-1]._replace(rows=drafts[-1].rows[:, : head.tokens or vocab_size])
        text = np.concatenate([text, drafts[-1].tokens[:number], [7]]).astype(np.int32)
    return drafts


def draft(opened: Decoder, text: TokenIds, num_tokens: int) -> Draft:
    """A greedy draft of an opened head."""
    assert opened.begin(text, num_tokens)
    tokens, rows, chances = text, [], []
    for _ in range(num_tokens):
        found = opened.run(Pass(tokens, num_last=1))
        rows.append(found.logits[0].copy())
        chances += [] if found.confidence is None else [found.confidence]
        tokens = append(tokens, [int(rows[-1].argmax())])
    return Draft(text, tokens[len(text) :], np.stack(rows), tuple(chances))


def plan(folder: Path, head: PublishedHead, context_length: int) -> PlannedHead:
    """The plan of a head for a target of which only what it lends is there."""
    target = shaped(read_source(folder / "target"), head)
    tensors, _ = read_tensors([folder / "lent.safetensors"])
    target = replace(target, config=replace(target.config, context_length=context_length), tensors=tensors)
    return plan_head(target, read_head(folder / "head"), "fp32")


if __name__ == "__main__":
    sys.exit(main())
