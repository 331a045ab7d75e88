"""The target's part of a training: it writes texts, and gives the hidden states of their tokens."""

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from time import monotonic
from typing import NamedTuple

import numpy as np

from edgespec import (
    FILE_NAME,
    Engine,
    IntegrityError,
    LocalSource,
    ModelError,
    Profile,
    Report,
    TokenIds,
    profile_target,
)
from edgespec.export.convert import export_model
from edgespec.system.console import show_progress
from edgespec.system.units import format_bytes, format_time
from edgespec.training.fit import find_device
from edgespec.training.lanes import Lanes, OwnText
from edgespec.training.packing import Text
from edgespec.training.prompts import PromptWriter
from edgespec.training.state_rows import ComputedRows, StateRows, StoredRows
from edgespec.training.stored_texts import Halves, ReadStates, TextsFile
from edgespec.training.target import FIRST_OWN, StatesReader, TargetWriter, open_engine_writer, write_answers
from edgespec.training.torch_reader import TorchReader
from edgespec.training.torch_target import TorchTarget, faster_precision, free_bytes, weights_bytes, why_not
from edgespec.training.torch_writer import TorchWriter, open_encoder
from edgespec.training.work_folder import TEXTS, WorkFolder

_ANSWERS_SHARE = 0.4  # of the time, at most
_STORED_AT_ONCE = 64  # texts that the target wrote itself
_AWAITED = 8  # of these, which are finished beyond the time
_READ_AT_ONCE = 16  # texts whose states are in memory before they are stored
_ANY_NUMBER = 1 << 62
_WEIGHTS_SHARE = 0.6  # of free memory, for a target that torch runs


class Written(NamedTuple):
    """What a target gave for a training.

    profile: What its passes take; None where a GPU ran it.
    """

    texts: list[Text]
    rows: StateRows
    profile: Profile | None


@dataclass(frozen=True)
class TargetRun:
    """The stages that need the target; each goes on from what lies in the folder."""

    folder: WorkFolder
    source: LocalSource
    report: Report

    def run(
        self, prompts: list[str], stored: list[tuple[TokenIds, TokenIds]], open_engine: Callable[[], Engine]
    ) -> Written:
        """Have the texts written, and their hidden states stored, unless a GPU computes these."""
        folder, own_share = self.folder, self.folder.options.own_share
        if own_share > 0 and not self._can_write_prompts:
            own_share = 0.0
        if self._is_on_gpu and (writer := self._open_in_torch([*prompts, *folder.options.held_out])):
            reader = TorchReader(writer.target, self.report)
            with closing(writer):
                self.write_texts(prompts, stored, lambda: nullcontext(writer), 1.0, own_share)
            texts = folder.require_enough(folder.read_texts().texts, prompts)
            return Written(texts, ComputedRows(reader, texts, folder.layers), None)
        in_step = not stored and own_share > 0 and self._writes_in_step
        given_share = 1 - own_share if in_step else 1.0
        left_s = self.write_texts(
            prompts, stored, lambda: open_engine_writer(open_engine), given_share, 0.0 if in_step else own_share
        )
        texts = folder.with_states(folder.read_texts())
        if (in_step or folder.states.missing(texts)) and (opened := self._open_in_torch([])):
            with closing(opened):
                reader = TorchReader(opened.target, self.report)
                self._store_states(texts, partial(reader.read, layers=folder.layers), _READ_AT_ONCE)
                if in_step:
                    self._write_in_step(opened, len(prompts), own_share * left_s)
        texts = folder.require_enough(folder.with_states(folder.read_texts()), prompts)
        exported = self._open_target()
        self._store_states(texts, exported.read)
        show_progress("measuring the target's passes")
        profile = profile_target(exported.decoder)
        show_progress("")
        return Written(texts, StoredRows(folder.states.rows(), find_device(folder.options.device)), profile)

    @property
    def _is_on_gpu(self) -> bool:
        """True where torch runs the target on a GPU, which computes hidden states as they are needed."""
        return self.folder.device != "cpu" and self._runs_in_torch

    @property
    def _most_tokens(self) -> int:
        """How many tokens all texts may have together, so that their hidden states fit the work folder."""
        return _ANY_NUMBER if self._is_on_gpu else self.folder.most_tokens

    def _open_in_torch(self, prompts: list[str]) -> TorchWriter | None:
        """The target in torch, where that runs all of it; prompts: That it will be given."""
        folder, device = self.folder, self.folder.device
        if not self._runs_in_torch:
            return None
        self.report(
            f"PyTorch runs {folder.loaded.source.name} on {device} in {self._precision}: reading its weights"
        )
        target = TorchTarget(folder.loaded, device, self._precision)
        return TorchWriter(target, folder.path, prompts, folder.options.longest_answer, self.report)

    @cached_property
    def _runs_in_torch(self) -> bool:
        """True where torch runs the target here; otherwise the reason is reported, once."""
        if problem := self._why_not_torch:
            self.report(f"PyTorch {problem}: ONNX Runtime runs it, which takes longer")
        return problem is None

    @cached_property
    def _precision(self) -> str:
        return faster_precision(self.folder.device)

    @cached_property  # whether the target writes in step depends on it, and must not change behind that
    def _why_not_torch(self) -> str | None:
        """Why torch does not run the target here, as words behind PyTorch; None where it does."""
        device, name = self.folder.device, self.folder.loaded.source.name
        if problem := why_not(self.folder.loaded):
            return f"does not run {name} itself, which has {problem}"
        needed = weights_bytes(self.folder.loaded, self._precision)
        if needed > _WEIGHTS_SHARE * free_bytes(device):
            return f"would need {format_bytes(needed)} of memory for {name}"
        return None

    def write_texts(
        self,
        prompts: list[str],
        stored: list[tuple[TokenIds, TokenIds]],
        open_writer: Callable[[], AbstractContextManager[TargetWriter]],
        time_share: float,
        own_share: float,
    ) -> float:
        """Have prompts answered: those held out, then the others in a share of the time that these leave.

        Returns:
            The seconds for answers that those to held-out prompts have left.
        """
        texts, options = self.folder.read_texts(), self.folder.options
        known = {text.tokens.tobytes() for text in texts.texts}
        number = max({-1, *(each for each in texts.numbers if each < FIRST_OWN)})
        for prompt, answer in stored:
            if np.append(prompt, answer).astype(np.int32).tobytes() not in known:
                number += 1
                texts.add(number, prompt, tuple(answer.tolist()))
        is_missing = time_share > 0 and (own_share > 0 or not texts.numbers.issuperset(range(2 * len(prompts))))
        is_missing = is_missing or not texts.numbers.issuperset(range(-len(options.held_out), 0))
        if is_missing and texts.num_tokens < self._most_tokens:
            with open_writer() as writer:
                return self._answer(writer, prompts, texts, len(stored), time_share, own_share)
        return self._answers_s

    def _answer(
        self,
        writer: TargetWriter,
        prompts: list[str],
        texts: TextsFile,
        num_stored: int,
        time_share: float,
        own_share: float,
    ) -> float:
        options, began, before, limit_s = (
            self.folder.options,
            monotonic(),
            texts.num_answer_tokens,
            self._answers_s,
        )
        longest, most_tokens = options.longest_answer, self._most_tokens
        write = partial(write_answers, writer, texts=texts, longest=longest, most_tokens=most_tokens)
        num_too_long = 0
        if num := len({*range(-len(options.held_out), 0)} - texts.numbers):
            self.report(f"the target answers {num} held-out prompts, for at most {format_time(limit_s / 2)}")
            num_too_long = write(options.held_out, is_held_out=True, limit_s=limit_s / 2)
            self.folder.require_held_out(texts.texts)
        left_s = limit_s - (monotonic() - began)
        if time_share > 0 and (prompts or own_share > 0):
            own = f"prompts, {own_share:.0%} of which it writes itself" if own_share else f"{len(prompts)} prompts"
            self.report(f"the target answers {own}, for at most {format_time(time_share * left_s)}")
            limit_s = time_share * left_s
            num_too_long += write(prompts, own_share=own_share, num_stored=num_stored, limit_s=limit_s)
        made, taken_s = texts.num_answer_tokens - before, max(1e-3, monotonic() - began)
        self.report(f"it wrote {made} tokens of answers in {taken_s:.0f} s, {made / taken_s:.0f} a second")
        if num_too_long:
            self.report(
                f"left out {num_too_long} prompts that leave no room for an answer in the target's context of "
                f"{self.folder.loaded.config.context_length} tokens"
            )
        return left_s

    @property
    def _answers_s(self) -> float:
        return _ANSWERS_SHARE * 60 * self.folder.options.minutes

    @property
    def _writes_in_step(self) -> bool:
        """True where the target's own prompts and answers are written by torch on a CPU."""
        return (
            self.folder.device == "cpu"
            and self._why_not_torch is None
            and self._precision == "bf16"
            and self._can_write_prompts
        )

    @cached_property
    def _can_write_prompts(self) -> bool:
        with closing(open_encoder(self.folder.loaded, self.folder.path)) as encoder:
            return PromptWriter(encoder.encode).can_write

    def _write_in_step(self, writer: TorchWriter, num_prompts: int, limit_s: float) -> None:
        """Have the target write prompts and answers, and store them with their hidden states."""
        texts, longest = self.folder.read_texts(), self.folder.options.longest_answer
        if texts.num_tokens >= self.folder.most_tokens:
            return
        began, before, new = monotonic(), texts.num_answer_tokens, list[OwnText]()
        first = max({2 * num_prompts - 1, *texts.numbers}) + 1
        asked = {text.prompt for text in texts.texts}
        prompter = PromptWriter(writer.encode)
        lanes = Lanes(writer.target, self.folder.layers, prompter, longest, seed=first, report=self.report)

        def keep() -> None:
            """Store the new texts; where that fails, the next run makes the states."""
            found, added = dict[bytes, Halves](), [*new]
            new.clear()
            for number, each in enumerate(added, max({first - 1, *texts.numbers}) + 1):
                texts.add(number, each.prompt, each.answer)
                found[texts.texts[-1].tokens.tobytes()] = each.states
            if added:
                stored = self.folder.with_states(texts)
                self.folder.states.fill(stored, lambda missing: [found[tokens.tobytes()] for tokens in missing])

        at_once = f"{lanes.num_lanes} at once, for at most {format_time(limit_s)}"
        self.report(f"the target writes prompts and answers itself, {at_once}")
        try:
            for text in lanes.write(limit_s, _AWAITED):
                if text.prompt.tobytes() not in asked:
                    asked.add(text.prompt.tobytes())
                    new.append(text)
                if len(new) >= _STORED_AT_ONCE:
                    keep()
                    show_progress(f"the target writes: {texts.num_answer_tokens - before} tokens of answers")
                    if texts.num_tokens >= self.folder.most_tokens:
                        break
        finally:
            keep()
            show_progress("")
        made, taken_s = texts.num_answer_tokens - before, max(1e-3, monotonic() - began)
        self.report(f"it wrote {made} tokens of answers in {taken_s:.0f} s, {made / taken_s:.0f} a second")

    def _store_states(self, texts: list[Text], read: ReadStates, num_at_once: int = 1) -> None:
        """Store the hidden states that are missing."""
        states = self.folder.states
        if num_foreign := states.num_foreign(texts):
            self.report(
                f"the hidden states of {num_foreign} texts are of others than {TEXTS} has; they are made again"
            )
        if missing := states.missing(texts):
            num_tokens = sum(len(text.tokens) for text in missing)
            size = format_bytes(num_tokens * states.row_bytes)
            self.report(f"storing the hidden states of {num_tokens} tokens, {size}")
            states.fill(texts, read, num_at_once)

    def _open_target(self) -> StatesReader:
        """The exported target; raises ModelError or IntegrityError: its folder is damaged."""
        folder = self.folder.target
        if not (folder / FILE_NAME).exists():
            self.report("exporting the target with its hidden states")
            export_model(self.source.path, folder, hidden_layers=self.folder.layers, origin=self.source.origin)
        try:
            return StatesReader(folder, self.folder.layers)
        except (ModelError, IntegrityError) as error:
            kind = IntegrityError if isinstance(error, IntegrityError) else ModelError
            problem = str(error).removesuffix("; export the model again")
            raise kind(f"{problem}; remove {folder} and train again") from None
