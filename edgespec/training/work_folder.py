"""The folder of a training: its options, and the files from which an interrupted one goes on."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from edgespec import EdgeSpecError, TokenIds, UsageError
from edgespec.export.sources import LoadedSource
from edgespec.system.context_managers import contextmanager
from edgespec.system.disk import explain_write_errors, hold_lock, replace_file
from edgespec.system.text_files import decode_text
from edgespec.training.fit import Recipe, find_device
from edgespec.training.packing import Text
from edgespec.training.prompts import PromptWriter
from edgespec.training.stored_texts import StatesFile, TextsFile
from edgespec.training.torch_writer import open_encoder
from edgespec.training.warm_start import read_layers

TEXTS, STATES, _RUN = "texts.jsonl", "states.f16", "run.json"
# Of the folder: before 2, held-out texts lay in a file of their own; before 3, other stored texts were held out.
_FORMAT, _FORMAT_OF_STORED = 2, 3
_FEWEST_TEXTS = 4  # to train on
_HELD_OUT = 1 / 12  # of the prompts, where none are kept aside
_STORED = 64  # tokens of a prompt, its last ones, with which a stored text begins at most


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The wishes of a user for a training.

    minutes: Of this run in all, the answers included.
    disk_bytes: For hidden states, at most.
    own_share: Of the texts, those whose prompts the target writes itself.
    held_out: Prompts whose answers are not trained on, and say how often the head is right.
    """

    minutes: float = 60.0
    disk_bytes: int = 4 << 30
    longest_answer: int = 256
    draft_vocab_size: int = 16_384
    device: str = "auto"  # of torch
    own_share: float = 0.0
    held_out: tuple[str, ...] = ()
    recipe: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class WorkFolder:
    """The files of a training in a folder; loaded is the target."""

    path: Path
    loaded: LoadedSource
    options: TrainingOptions

    @property
    def layers(self) -> tuple[int, ...]:
        """Whose hidden states are stored: what the head's layer shall read, and after the target's final norm."""
        return read_layers(self.loaded, self.options.recipe.num_states)

    @property
    def states(self) -> StatesFile:
        return StatesFile(self.path / STATES, len(self.layers) * self.loaded.config.hidden_size)

    @property
    def device(self) -> str:
        """Where torch runs the target: a GPU that it has CUDA for, or the CPU."""
        device = find_device(self.options.device)
        return device if device.startswith("cuda") else "cpu"

    @property
    def most_tokens(self) -> int:
        """The number of tokens, of all texts together, whose hidden states the disk may take."""
        return self.options.disk_bytes // self.states.row_bytes

    @property
    def target(self) -> Path:
        """The exported target, which gives hidden states."""
        return self.path / "target"

    @property
    def tokens(self) -> Path:
        """The tokens that can be drafted."""
        return self.path / "tokens.i32"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.safetensors"

    def read_texts(self) -> TextsFile:
        return TextsFile(self.path / TEXTS, self.loaded.config.vocab_size)

    def with_states(self, texts: TextsFile) -> list[Text]:
        """The texts whose states have room."""
        return self.states.fitting(texts.texts, self.options.disk_bytes)

    def require_held_out(self, texts: Sequence[Text]) -> None:
        """Raises UsageError: A user keeps prompts aside, and the texts have no answer to any of these."""
        if self.options.held_out and not any(text.is_held_out for text in texts):
            raise UsageError(
                f"answers to the {len(self.options.held_out)} prompts of --held-out: 0, wanted 1 at least; give "
                f"shorter prompts or more time (--minutes){self._advise_room(texts)}"
            )

    def require_enough(self, texts: list[Text], prompts: list[str]) -> list[Text]:
        """Return the texts. Raises UsageError: They are too few to train on and compare with."""
        num_found, (_, trained) = sum(not text.is_held_out for text in texts), self.split(texts)
        if num_found < _FEWEST_TEXTS or not trained:
            num = f"{num_found}, all of prompts that are held out" if num_found >= _FEWEST_TEXTS else num_found
            more = "give more prompts or more time (--minutes)" if prompts else "chat with the model first"
            raise UsageError(
                f"texts to train on: {num}, wanted {_FEWEST_TEXTS} at least; {more}{self._advise_room(texts)}"
            )
        self.require_held_out(texts)
        if not any(len(text.tokens) - text.num_prompt > 1 for text in trained):
            raise UsageError("no answer to train on has two tokens; give prompts that the model answers with text")
        return texts

    def _advise_room(self, texts: Sequence[Text]) -> str:
        """What would give more texts, where these are not all, since hidden states had no room."""
        is_part = len(texts) < len(self.read_texts().texts)
        return ", or give more room for hidden states (--disk)" if is_part else ""

    def split(self, texts: list[Text]) -> tuple[list[Text], list[Text]]:
        """The texts that are held out, and those of other prompts, to train on.

        Where no prompts are kept aside these are some of twelve, the same ones in each run, or one at least. A
        text that begins with a prompt, or with what a stored text has of it, counts as one of this prompt.
        """
        prompts = [self._prompt_of(text) for text in texts]
        is_held_out = [text.is_held_out for text in texts]
        if texts and not any(is_held_out):
            places = [_place_of(prompt) for prompt in prompts]
            is_held_out = [place <= max(_HELD_OUT, min(places)) for place in places]
        held_out = [text for text, is_out in zip(texts, is_held_out, strict=True) if is_out]
        known = {prompt for prompt, is_out in zip(prompts, is_held_out, strict=True) if is_out}
        known |= {text.prompt[-4 * _STORED :] for text in held_out if text.num_prompt > _STORED}
        lengths = {len(prompt) for prompt in known}

        def is_known(text: Text) -> bool:
            content = text.tokens.tobytes()
            return any(content[:length] in known for length in lengths)

        return held_out, [text for text in texts if not is_known(text)]

    def _prompt_of(self, text: Text) -> bytes:
        """The tokens by which texts of one prompt are known.

        Where a stored text's answer begins is a guess, half of the text at most: its prompt is known up to where
        the chat template begins an answer first, if it does so in what a text has of its prompt.
        """
        size = len(self.middle)
        is_guess = not text.is_held_out and text.num_prompt == min(_STORED, len(text.tokens) // 2)
        if is_guess and 0 < size <= len(head := text.tokens[:_STORED]):
            begins = (sliding_window_view(head, size) == self.middle).all(1)
            if begins.any():
                return text.tokens[: int(begins.argmax()) + size].tobytes()
        return text.prompt

    @cached_property
    def middle(self) -> TokenIds:
        """The tokens from the end of a user's turn to the answer; none where the chat template marks no turns."""
        with suppress(EdgeSpecError), closing(open_encoder(self.loaded, self.path)) as encoder:
            return PromptWriter(encoder.encode).middle
        return np.zeros(0, np.int32)


def work_folder_of(output: Path) -> Path:
    """The folder beside the head; raises UsageError: output has no name, as . and / have none."""
    if not output.name or output.name == "..":
        raise UsageError(f"--output is {output}, which names no new folder; give the folder of the head to write")
    return output.with_name(f"{output.name}.work")


@contextmanager
def hold_work(work: Path, output: Path, kind: Mapping[str, object]) -> Iterator[None]:
    """Make the folder, or take it up again; raises UsageError: it is another's."""
    run = work / _RUN
    if not run.exists() and os.path.lexists(output):
        raise UsageError(f"{output} already exists; remove it or choose another --output")
    with explain_write_errors(work.parent, 1 << 20):
        try:
            work.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UsageError(f"{work} cannot be a folder ({error.strerror}); choose another --output") from None
    with hold_lock(work / "lock", timeout_s=1.0):
        stated = json.loads(json.dumps(kind))
        if not run.exists():
            replace_file(run, json.dumps(stated).encode())
        elif (found := read_run(work)) != stated:
            changed = [key for key in {**stated, **found} if found.get(key) != stated.get(key)]
            other = f"a training with other settings ({', '.join(changed)})"
            maker = "another version of edgespec" if "format" in changed else other
            raise UsageError(f"{work} is of {maker}; remove it or choose another --output")
        yield


def read_run(work: Path) -> dict[str, object]:
    """The facts of the run in a folder; none where its file is damaged."""
    try:
        found = json.loads(decode_text((work / _RUN).read_bytes()))
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def describe_run(loaded: LoadedSource, options: TrainingOptions, prompts: list[str]) -> dict[str, object]:
    """The facts that must be as they were for a run to go on; of stored answers there may be more."""
    return {
        "format": _FORMAT if prompts else _FORMAT_OF_STORED,
        "source": loaded.source.sha256,
        "corpus": _hash(prompts) if prompts else "stored answers",
        **({"held-out prompts": _hash(options.held_out)} if options.held_out else {}),
        "draft_vocab_size": min(options.draft_vocab_size, loaded.config.vocab_size),
        "layers": read_layers(loaded, options.recipe.num_states),
    }


def _place_of(prompt: bytes) -> float:
    """A number from 0 to 1, for some prompts as likely as any other."""
    return int.from_bytes(hashlib.sha256(prompt).digest()[:4]) / (1 << 32)


def _hash(prompts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(prompts).encode()).hexdigest()
