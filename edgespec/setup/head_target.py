"""Which target a drafting head drafts for: the one whose vocabulary and hidden states it was made for.

Before a head is installed it runs after the target's own text. One that was made for another model, or whose
settings say something else than its weights, runs without an error and drafts at random. How often its first token
is the target's tells such heads from weak ones.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgespec.decoding.decoder import Decoder
from edgespec.errors import (
    DeviceUnavailable,
    ModelError,
    SourceError,
    UnsuitedModel,
    UsageError,
    VocabularyMismatch,
)
from edgespec.manifest import Manifest, read_manifest
from edgespec.runtimes.devices import Device, find_device
from edgespec.runtimes.heads import open_head
from edgespec.setup.device_choice import source_of
from edgespec.setup.open_model import (
    ModelFolder,
    find_subset,
    layers_read,
    open_with_states,
    read_chat_template,
    read_folder,
    read_tokenizer,
    require_whole_model,
)
from edgespec.setup.pair import TARGET, read_pair
from edgespec.system.command_line import quote
from edgespec.system.console import show_progress
from edgespec.text.prompt_encoder import PromptEncoder
from edgespec.types import Report, TokenIds, append


def read_whole_model(folder: Path, name: str) -> ModelFolder:
    """The model of a folder that answers by itself; of a pair its target.

    Raises ModelError: There is none, or it cannot serve as a target.
    """
    pair = read_pair(folder)
    found = folder if pair is None else pair.part(TARGET) or folder
    model = read_folder(found)
    require_whole_model(model.manifest, name)
    return model


def require_own_target(target: Manifest, drafters: Sequence[Manifest], text: str | None = None) -> None:
    """Check a drafter model that may be a head.

    Args:
        drafters: The drafter model of the target, and those that draft for it in turn.
        text: The text drafter after these, if any.

    Raises:
        ModelError: It is a head, and the target does not give the hidden states that it reads.
        UnsuitedModel: It gives vectors of texts, and writes none.
        UsageError: A head is part of a cascade.
        VocabularyMismatch: It is a head for another vocabulary.
    """
    if pooled := [drafter.name for drafter in drafters if drafter.pooling]:
        raise UnsuitedModel(f"{pooled[0]} is an embedding model and cannot draft; choose a model that writes text")
    if any(drafter.head for drafter in drafters) and (len(drafters) > 1 or text):
        named = next(drafter.name for drafter in drafters if drafter.head)
        raise UsageError(
            f"{named} is a drafting head, which drafts only for its target, and for which nothing else drafts; "
            "name it by itself, or with a plus, as in HEAD+suffix"
        )
    head = drafters[0].head if drafters else None
    if head is None:
        return
    name = drafters[0].name
    remake = f"make the pair with: edgespec export {quote(source_of(target))} --drafter HEAD --output DIR"
    if drafters[0].vocab_sha256 != target.vocab_sha256:
        raise VocabularyMismatch(
            f"{name} was made for another vocabulary than that of {target.name}; use it with its own target, or "
            f"{remake}, with a head that was made for {target.name}"
        )
    if not {*head.target_layers} <= {*target.hidden_layers}:
        given = f"those of {_list(target.hidden_layers)}" if target.hidden_layers else "none"
        raise ModelError(
            f"{name} reads the hidden states of layers {_list(head.target_layers)} of its target, and "
            f"{target.name} gives {given}; {remake}, which exports a target that gives them"
        )


def _list(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


PROMPTS = (
    "What should I look at when I buy a used bicycle?",
    "Write a Python function that merges two sorted lists into one, with a docstring.",
    "Translate into French: The library closes at six, but the reading room stays open until nine.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel, and how fast if it covers 246 km?",
    "Summarise in one sentence: The town council voted on Monday to turn the old tram depot into a covered "
    "market. Work begins in spring and is to take two years. Shopkeepers nearby had asked for it since 2019.",
    "Write a polite note to a neighbour whose dog barks at night.",
)
LEAST_AGREEMENT = 0.2
_NUM_TOKENS = 200
_TOKENS_PER_TEXT = 40


class HeadAgreement(NamedTuple):
    """At how many of some places in its target's own text a head drafts the target's token first."""

    num_tokens: int
    num_right: int

    @property
    def share(self) -> float:
        return self.num_right / self.num_tokens if self.num_tokens else 0.0


def require_agreement(target: Path, head: Path, devices: tuple[str, str], report: Report) -> HeadAgreement:
    """Run a head after 200 tokens that its target writes.

    Args:
        target, head: Model folders; the target gives the hidden states that the head reads.
        devices: Names of the devices that both were exported for; the CPU serves where one is not in this machine.

    Raises SourceError: Its first token is the target's at fewer than LEAST_AGREEMENT of the places.
    """
    report("checking the head on the target's own text")
    agreement = measure_agreement(target, head, devices)
    name, share = read_manifest(head).name, f"{agreement.share:.0%} of {agreement.num_tokens} places"
    if agreement.share < LEAST_AGREEMENT:
        raise SourceError(
            f"{name} is not a head of this target: its first token is the target's at {share} in the target's own "
            f"text, wanted {LEAST_AGREEMENT:.0%} or more; nothing was installed. It was made for another model, "
            "or for another version of it, was trained too little, or its settings are not those of its weights: "
            "name a head that was made for this one, or train it longer (--no-check installs it all the same)"
        )
    report(f"its first token is the target's at {share} in the target's own text")
    return agreement


def measure_agreement(target: Path, head: Path, devices: tuple[str, str] = ("cpu", "cpu")) -> HeadAgreement:
    """Run a head after texts that its target writes; arguments as of require_agreement."""
    decoder, drafter = open_pair(target, head, devices)
    manifest = read_manifest(target)
    template = read_chat_template(ModelFolder(target, manifest))
    num_right = num_tokens = 0
    with closing(PromptEncoder(manifest, read_tokenizer(target, manifest), template)) as encoder:
        for prompt in PROMPTS:
            left = min(_TOKENS_PER_TEXT, _NUM_TOKENS - num_tokens)
            found = _compare(decoder, drafter, encoder.encode(prompt), left, manifest.eos_token_ids)
            num_tokens, num_right = num_tokens + found.num_tokens, num_right + found.num_right
            show_progress("checking the head", num_tokens / _NUM_TOKENS)
    show_progress("")
    return HeadAgreement(num_tokens, num_right)


def _compare(
    target: Decoder, head: Decoder, tokens: TokenIds, num_tokens: int, ends: Iterable[int]
) -> HeadAgreement:
    """Let the target write so many tokens after a prompt, or up to an end, and the head guess each.

    Fewer where the target's context ends.
    """
    num_right, num_tokens = 0, max(0, min(num_tokens, target.context_length - len(tokens) + 1))
    for number in range(num_tokens):
        right = int(target.logits(tokens, 1)[-1].argmax())
        if head.begin(tokens, 1):
            num_right += int(head.logits(tokens, 1)[-1].argmax()) == right
        if right in ends:
            return HeadAgreement(number + 1, num_right)
        tokens = append(tokens, np.array([right], np.int32))
    return HeadAgreement(num_tokens, num_right)


def open_pair(target: Path, head: Path, devices: tuple[str, str] = ("cpu", "cpu")) -> tuple[Decoder, Decoder]:
    """The decoders of a target and of a head that reads its hidden states; arguments as of require_agreement."""
    own = read_manifest(head)
    decoder = open_with_states(target, layers_read([own]), _here(devices[0]))
    assert decoder.hidden_states is not None
    subset = find_subset(head, own)
    return decoder, open_head(head, own, _here(devices[1]), decoder.hidden_states, subset)


def _here(name: str) -> Device:
    """The device of a name; the CPU where it is not in this machine."""
    try:
        device = find_device(name)
    except DeviceUnavailable:
        return find_device("cpu")
    return find_device("cpu") if device.is_software else device
