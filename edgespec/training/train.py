"""From a target to a head that drafts for it: prompts, answers, hidden states, training, report.

All that is made lies in a folder beside the head, so that an interrupted training goes on where it ended.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic

import numpy as np

from edgespec import (
    FILE_NAME,
    EdgeSpecError,
    Engine,
    IntegrityError,
    LocalSource,
    ModelError,
    Profile,
    Report,
    TokenIds,
    UsageError,
    free_memory,
    profile_target,
    read_manifest,
)
from edgespec.export.convert import export_model
from edgespec.export.sources import LoadedSource, read_source
from edgespec.system.console import show_progress
from edgespec.system.disk import explain_write_errors, hold_lock, replace_file
from edgespec.system.text_files import decode_text
from edgespec.system.units import format_bytes
from edgespec.training.checkpoint import TrainingProgress
from edgespec.training.fit import Data, Recipe, Trainer, find_device
from edgespec.training.head_file import WEIGHTS, write_head
from edgespec.training.lanes import Lanes, OwnText
from edgespec.training.network import HeadShape
from edgespec.training.objective import (
    INT8_BYTES,
    ExpectedGain,
    TrainingReport,
    estimate_draft_cost,
    expected_gain,
)
from edgespec.training.packing import Floats, Text
from edgespec.training.prompts import PromptWriter
from edgespec.training.stored_texts import Halves, ReadStates, StatesFile, TextsFile, read_tokens
from edgespec.training.target import StatesReader, TargetWriter, open_engine_writer, write_answers
from edgespec.training.torch_target import TorchTarget, faster_precision, weights_bytes, why_not
from edgespec.training.torch_writer import TorchWriter
from edgespec.training.warm_start import (
    FittedRows,
    choose_tokens,
    expected_counts,
    fit_join,
    head_shape,
    matrix,
    read_layers,
    sample_rows,
    start_weights,
)

_ANSWERS_SHARE = 0.4  # of the time, at most
_FEWEST_TEXTS = 4
_TRAINING_SHARE, _LEAST_TRAINING_S = 0.4, 10.0  # of the time, at least
_SAMPLED_ROWS = 30_000
_STORED_AT_ONCE = 64  # texts that the target wrote itself
_HELD_OUT = 12  # each text of so many, where no prompts are kept aside
_TARGET, _TEXTS, _STATES, _CHECKPOINT, _RUN = (
    "target",
    "texts.jsonl",
    "states.f16",
    "checkpoint.safetensors",
    "run.json",
)
_TOKENS, _HELD_TEXTS = "tokens.i32", "held-out.jsonl"  # that can be drafted; answers that are not trained on
_WEIGHTS_SHARE = 0.6  # of free memory, for a target that torch runs on a CPU


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """minutes: Of this run in all, the answers included. disk_bytes: For hidden states, at most.

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


def require_torch() -> None:
    """Raises EdgeSpecError: PyTorch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise EdgeSpecError(
            f'training needs PyTorch, which does not load ({error}); install it: pip install "edgespec[train]"'
        ) from None


def train(
    source: LocalSource,
    output: Path,
    options: TrainingOptions,
    *,
    prompts: list[str],
    stored: list[tuple[TokenIds, TokenIds]],
    open_engine: Callable[[], Engine],
    report: Report,
) -> TrainingReport:
    """Train a head and write it to output; the folder OUTPUT.work has what another run goes on from.

    Args:
        source: Of the target.
        prompts: That the target answers.
        stored: Prompts, or their ends, and answers that it wrote earlier, in their place.
        open_engine: Loads the target to answer.

    Raises:
        UsageError: There is too little text, or the folder is of another training.
        SourceError: The source is damaged or unsupported.
        DiskFull: There is no room.
    """
    began = monotonic()
    require_torch()
    loaded = read_source(source.path)
    work = _work_folder(output)
    kind = _describe_run(loaded, options, prompts, stored)
    with _hold_work(work, output, kind):
        folder = _Folder(work, output, loaded, source, options, report)
        try:
            texts, profile = folder.run_target(prompts, stored, open_engine)
            return folder.train(texts, profile, began)
        except KeyboardInterrupt:
            best = (
                f"the best head so far is in {output}" if (output / WEIGHTS).is_file() else "there is no head yet"
            )
            report(f"{best}; what was made for it is in {work}, and the same command goes on")
            raise


def _describe_run(
    loaded: LoadedSource, options: TrainingOptions, prompts: list[str], stored: list[tuple[TokenIds, TokenIds]]
) -> dict[str, object]:
    """The facts that must be as they were for a run to go on."""
    answers = b"".join(each.tobytes() for text in stored for each in text)
    return {
        "source": loaded.source.sha256,
        "corpus": _hash(prompts) if prompts else hashlib.sha256(answers).hexdigest(),
        **({"held-out prompts": _hash(options.held_out)} if options.held_out else {}),
        "draft_vocab_size": min(options.draft_vocab_size, loaded.config.vocab_size),
        "layers": read_layers(loaded, options.recipe.num_states),
    }


def _hash(prompts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(prompts).encode()).hexdigest()


def _work_folder(output: Path) -> Path:
    """The folder beside the head; raises UsageError: output has no name, as . and / have none."""
    if not output.name or output.name == "..":
        raise UsageError(f"--output is {output}, which names no new folder; give the folder of the head to write")
    return output.with_name(f"{output.name}.work")


@contextmanager
def _hold_work(work: Path, output: Path, kind: Mapping[str, object]) -> Iterator[None]:
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
        elif (found := _read_run(run)) != stated:
            changed = [key for key in stated if found.get(key) != stated[key]] or ["format"]
            raise UsageError(
                f"{work} is of another training (its {' and '.join(changed)} differ); "
                "remove it or choose another --output"
            )
        yield


def _read_run(path: Path) -> dict[str, object]:
    try:
        found = json.loads(decode_text(path.read_bytes()))
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class _Folder:
    """The stages of a training, each of which goes on from what lies in the folder."""

    work: Path
    output: Path
    loaded: LoadedSource
    source: LocalSource
    options: TrainingOptions
    report: Report

    @property
    def layers(self) -> tuple[int, ...]:
        """Whose hidden states are stored: what the head's layer shall read, and after the target's final norm."""
        return read_layers(self.loaded, self.options.recipe.num_states)

    @property
    def states(self) -> StatesFile:
        return StatesFile(self.work / _STATES, len(self.layers) * self.loaded.config.hidden_size)

    def run_target(
        self, prompts: list[str], stored: list[tuple[TokenIds, TokenIds]], open_engine: Callable[[], Engine]
    ) -> tuple[list[Text], Profile | None]:
        """The texts, whose hidden states are stored, and what the target's passes take, unless a GPU ran them."""
        if self._torch_device != "cpu" and (writer := self._open_in_torch([*prompts, *self.options.held_out])):
            with closing(writer):
                self.write_texts(prompts, stored, lambda: nullcontext(writer), 1.0, self.options.own_share)
                texts = self._fitting(prompts)
                self._store_states(texts, partial(writer.read, layers=self.layers), writer.texts_at_once)
            return texts, None
        own_share = self.options.own_share
        in_step = self._writes_in_step and not stored and own_share > 0
        given_share = 1 - own_share if in_step else 1.0
        texts = self.write_texts(
            prompts, stored, lambda: open_engine_writer(open_engine), given_share, 0.0 if in_step else own_share
        )
        if (in_step or self.states.missing(texts)) and (reader := self._open_in_torch([])):
            with closing(reader):
                self._store_states(texts, partial(reader.read, layers=self.layers), reader.texts_at_once)
                if in_step:
                    self._write_in_step(reader, len(prompts))
        texts = self._fitting(prompts)
        exported = self._open_target()
        self._store_states(texts, exported.read)
        show_progress("measuring the target's passes")
        profile = profile_target(exported.decoder)
        show_progress("")
        return texts, profile

    @property
    def _torch_device(self) -> str:
        """Where torch runs the target: a GPU that it has CUDA for, or the CPU."""
        device = find_device(self.options.device)
        return device if device.startswith("cuda") else "cpu"

    def _open_in_torch(self, prompts: list[str]) -> TorchWriter | None:
        """The target in torch, where that runs all of it; prompts: That it will be given."""
        device, name, precision = self._torch_device, self.loaded.source.name, faster_precision(self._torch_device)
        if problem := self._why_not_torch:
            self.report(f"PyTorch {problem}: ONNX Runtime runs it, which takes longer")
            return None
        self.report(f"PyTorch runs {name} on {device} in {precision}: reading its weights")
        target = TorchTarget(self.loaded, device, precision)
        return TorchWriter(target, self.work, prompts, self.options.longest_answer, self.report)

    @property
    def _why_not_torch(self) -> str | None:
        """Why torch does not run the target here, as words behind PyTorch; None where it does."""
        device, name = self._torch_device, self.loaded.source.name
        if problem := why_not(self.loaded):
            return f"does not run {name} itself, which has {problem}"
        needed = weights_bytes(self.loaded, faster_precision(device))
        if device == "cpu" and needed > _WEIGHTS_SHARE * free_memory().free_bytes:
            return f"would need {format_bytes(needed)} of memory for {name}"
        return None

    def write_texts(
        self,
        prompts: list[str],
        stored: list[tuple[TokenIds, TokenIds]],
        open_writer: Callable[[], AbstractContextManager[TargetWriter]],
        time_share: float,
        own_share: float,
    ) -> list[Text]:
        """The texts whose states have room, once prompts are answered in a share of the time for answers."""
        size = self.loaded.config.vocab_size
        texts, held_out = TextsFile(self.work / _TEXTS, size), TextsFile(self.work / _HELD_TEXTS, size)
        for number, (prompt, answer) in enumerate(stored):
            if number not in texts.numbers:
                texts.add(number, prompt, tuple(answer.tolist()))
        is_missing = time_share > 0 and (own_share > 0 or 2 * len(prompts) > len(texts.numbers))
        is_missing = is_missing or len(self.options.held_out) > len(held_out.numbers)
        if is_missing and texts.num_tokens < self._most_tokens:
            with open_writer() as writer:
                self._answer(writer, prompts, texts, held_out, len(stored), time_share, own_share)
        return self._with_states(held_out, texts)

    def _with_states(self, held_out: TextsFile, texts: TextsFile) -> list[Text]:
        """The texts whose states have room, by their places among these."""
        behind = (text._replace(start=held_out.num_tokens + text.start) for text in texts.texts)
        return self.states.fitting([*held_out.texts, *behind], self.options.disk_bytes)

    def _fitting(self, prompts: list[str]) -> list[Text]:
        """The texts whose states have room; raises UsageError: They are too few to train on."""
        size = self.loaded.config.vocab_size
        texts, held_out = TextsFile(self.work / _TEXTS, size), TextsFile(self.work / _HELD_TEXTS, size)
        fitting = self._with_states(held_out, texts)
        num_found = max(0, len(fitting) - len(held_out.texts))
        if num_found < _FEWEST_TEXTS:
            more = (
                "give more prompts, more time (--minutes)" if prompts else "chat with the model first, or give it"
            )
            raise UsageError(
                f"texts to train on: {num_found}, wanted {_FEWEST_TEXTS} at least; {more} "
                f"{'or ' if prompts else ''}more room for hidden states (--disk)"
            )
        return fitting

    @property
    def _most_tokens(self) -> int:
        return self.options.disk_bytes // self.states.row_bytes

    def _answer(
        self,
        writer: TargetWriter,
        prompts: list[str],
        texts: TextsFile,
        held_out: TextsFile,
        num_stored: int,
        time_share: float,
        own_share: float,
    ) -> None:
        longest, began, before = self.options.longest_answer, monotonic(), texts.num_answer_tokens
        limit_s = time_share * _ANSWERS_SHARE * 60 * self.options.minutes
        own = f"prompts, {own_share:.0%} of which it writes itself" if own_share else f"{len(prompts)} prompts"
        self.report(f"the target answers {own}, for at most {limit_s / 60:.0f} min")
        write = partial(write_answers, writer, longest=longest, most_tokens=self._most_tokens)
        write(self.options.held_out, held_out, num_rounds=1, limit_s=limit_s / 2)
        limit_s -= monotonic() - began
        num_too_long = write(prompts, texts, own_share=own_share, num_stored=num_stored, limit_s=limit_s)
        made, taken_s = texts.num_answer_tokens - before, monotonic() - began
        self.report(f"it wrote {made} tokens of answers in {taken_s:.0f} s, {made / taken_s:.0f} a second")
        if num_too_long:
            self.report(
                f"left out {num_too_long} prompts that leave no room for an answer in the target's context of "
                f"{self.loaded.config.context_length} tokens"
            )

    @property
    def _writes_in_step(self) -> bool:
        """True where the target's own prompts and answers are written by torch on a CPU."""
        return (
            self._torch_device == "cpu"
            and self._why_not_torch is None
            and bool(self.loaded.vocabulary.chat_template)
            and faster_precision("cpu") == "bf16"
        )

    def _write_in_step(self, writer: TorchWriter, num_prompts: int) -> None:
        """Have the target write prompts and answers, and store them with their hidden states."""
        size, options = self.loaded.config.vocab_size, self.options
        limit_s = options.own_share * _ANSWERS_SHARE * 60 * options.minutes
        texts, held_out = TextsFile(self.work / _TEXTS, size), TextsFile(self.work / _HELD_TEXTS, size)
        if texts.num_tokens >= self._most_tokens:
            return
        began, before, new = monotonic(), texts.num_answer_tokens, list[OwnText]()
        first = max({2 * num_prompts - 1, *texts.numbers}) + 1
        asked = {text.tokens[: text.num_prompt].tobytes() for text in texts.texts}
        prompter = PromptWriter(writer.encode)
        lanes = Lanes(writer.target, self.layers, prompter, options.longest_answer, seed=first, report=self.report)

        def keep() -> None:
            """Store the new texts; where that fails, the next run makes the states."""
            found, added = dict[bytes, Halves](), [*new]
            new.clear()
            for number, each in enumerate(added, max({first - 1, *texts.numbers}) + 1):
                texts.add(number, each.prompt, each.answer)
                found[texts.texts[-1].tokens.tobytes()] = each.states
            if added:
                stored = self._with_states(held_out, texts)
                self.states.fill(stored, lambda missing: [found[tokens.tobytes()] for tokens in missing])

        at_once = f"{lanes.num_lanes} at once, for at most {limit_s / 60:.0f} min"
        self.report(f"the target writes prompts and answers itself, {at_once}")
        try:
            for text in lanes.write(limit_s, max(0, 2 * _FEWEST_TEXTS - len(texts.texts))):
                if text.prompt.tobytes() not in asked:
                    asked.add(text.prompt.tobytes())
                    new.append(text)
                if len(new) >= _STORED_AT_ONCE:
                    keep()
                    show_progress(f"the target writes: {texts.num_answer_tokens - before} tokens of answers")
                    if texts.num_tokens >= self._most_tokens:
                        break
        finally:
            keep()
            show_progress("")
        made, taken_s = texts.num_answer_tokens - before, max(1e-3, monotonic() - began)
        self.report(f"it wrote {made} tokens of answers in {taken_s:.0f} s, {made / taken_s:.0f} a second")

    def _split(self, texts: list[Text]) -> tuple[list[Text], list[Text]]:
        """The texts that are held out, and those to train on."""
        if self.options.held_out:
            num = len(TextsFile(self.work / _HELD_TEXTS, self.loaded.config.vocab_size).texts)
            return texts[:num], texts[num:]
        return texts[::_HELD_OUT], [text for i, text in enumerate(texts) if i % _HELD_OUT]

    def train(self, texts: list[Text], profile: Profile | None, began: float) -> TrainingReport:
        held_out, trained = self._split(texts)
        shape, data, start = self.prepare(trained, held_out, self.options.recipe)
        trainer = Trainer(
            shape,
            data,
            start,
            self.work / _CHECKPOINT,
            lambda weights: write_head(
                self.output, shape, weights, data.tokens, self._target_name, self.layers[-shape.num_states : -1]
            ),
            self.options.device,
            has_best=(self.output / WEIGHTS).is_file(),
            recipe=self.options.recipe,
        )
        wanted_s = 60 * self.options.minutes
        left_s = max(_LEAST_TRAINING_S, _TRAINING_SHARE * wanted_s, wanted_s - (monotonic() - began))
        self.report(
            f"training a head of {shape.num_weights / 1e6:.1f} M weights on {len(trained)} texts on "
            f"{trainer.device}, in {trainer.precision}, for at most {left_s / 60:.0f} min; "
            "Ctrl-C keeps what is trained"
        )
        progress = trainer.run(left_s)
        return self._describe(shape, data, progress, trainer.precision, profile)

    def _store_states(self, texts: list[Text], read: ReadStates, num_at_once: int = 1) -> None:
        """Store the hidden states that are missing."""
        states = self.states
        states.trust(texts)
        if num_foreign := states.num_foreign(texts):
            self.report(
                f"the hidden states of {num_foreign} texts are of others than {_TEXTS} has; they are made again"
            )
        if missing := states.missing(texts):
            num_tokens = sum(len(text.tokens) for text in missing)
            size = format_bytes(num_tokens * states.row_bytes)
            self.report(f"storing the hidden states of {num_tokens} tokens, {size}")
            states.fill(texts, read, num_at_once)

    def _open_target(self) -> StatesReader:
        """The exported target; raises ModelError or IntegrityError: its folder is damaged."""
        folder = self.work / _TARGET
        if not (folder / FILE_NAME).exists():
            self.report("exporting the target with its hidden states")
            export_model(self.source.path, folder, hidden_layers=self.layers, origin=self.source.origin)
        try:
            return StatesReader(folder, self.layers)
        except (ModelError, IntegrityError) as error:
            kind = IntegrityError if isinstance(error, IntegrityError) else ModelError
            problem = str(error).removesuffix("; export the model again")
            raise kind(f"{problem}; remove {folder} and train again") from None

    def prepare(
        self, trained: list[Text], held_out: list[Text], recipe: Recipe
    ) -> tuple[HeadShape, Data, dict[str, Floats]]:
        """The head's sizes, what it is trained on, and the weights from which it starts."""
        config, rows = self.loaded.config, self.states.rows()
        embedding = matrix(self.loaded.tensors["embedding"])
        head = matrix(self.loaded.head) if "head" in self.loaded.tensors else embedding
        tokens = self._tokens(rows, trained, head)
        num_states = min(recipe.num_states, len(self.layers))  # of a target with few layers
        shape = head_shape(self.loaded, len(tokens), num_states, recipe.markov_rank)
        data = Data(
            rows=rows,
            texts=trained,
            held_out=held_out,
            embedding=embedding,
            head=head[tokens],
            tokens=tokens,
            logit_scale=config.logit_scale,
            logit_cap=config.logit_cap,
        )
        matrices = self._fit_join(rows, trained, embedding, num_states)
        return shape, data, start_weights(shape, self.loaded, head, tokens, *matrices)

    def _fit_join(
        self, rows: Halves, trained: list[Text], embedding: Floats, num_states: int
    ) -> tuple[Floats, Floats]:
        show_progress("finding the weights to start from")
        size = self.loaded.config.hidden_size
        # Of answers alone: with the prompts' rows beside them the start is worse (docs/log/training.md).
        ends = [(max(1, text.num_prompt), len(text.tokens)) for text in trained]
        stored = np.concatenate([text.start + np.arange(*each) for text, each in zip(trained, ends, strict=True)])
        tokens = np.concatenate([text.tokens[slice(*each)] for text, each in zip(trained, ends, strict=True)])
        parts = (
            FittedRows(
                embedding[tokens[part]],
                rows[stored[part] - 1][:, -num_states * size :].astype(np.float32),
                rows[stored[part]][:, -2 * size : -size].astype(np.float32),
            )
            for part in sample_rows(len(stored), size, num_states)
        )
        return fit_join(parts, self.loaded.config.rms_eps)

    def _tokens(self, rows: Halves, trained: list[Text], head: Floats) -> TokenIds:
        """The tokens that can be drafted; those of the first run, if another one goes on with it."""
        path, config = self.work / _TOKENS, self.loaded.config
        if path.exists():
            return read_tokens(path, config.vocab_size)
        show_progress("choosing the tokens that can be drafted")
        before = [
            np.arange(text.start + text.num_prompt - 1, text.start + len(text.tokens) - 1) for text in trained
        ]
        behind = np.concatenate(before)
        sample = np.sort(behind[:: max(1, len(behind) // _SAMPLED_ROWS)])
        states = rows[sample][:, -config.hidden_size :].astype(np.float32)
        device = self._torch_device
        counts = expected_counts(states, head, config.logit_scale, config.logit_cap, device)
        size = min(self.options.draft_vocab_size, config.vocab_size)
        tokens = choose_tokens(counts, size, self.loaded.vocabulary.eos_token_ids)
        replace_file(path, tokens.astype("<i4").tobytes())
        show_progress("")
        return tokens

    @property
    def _target_name(self) -> str:
        return self.source.origin.repository or self.loaded.source.name

    def _describe(
        self, shape: HeadShape, data: Data, progress: TrainingProgress, precision: str, profile: Profile | None
    ) -> TrainingReport:
        answers = np.concatenate([text.tokens[text.num_prompt :] for text in data.held_out])
        return TrainingReport(
            texts=len(data.texts),
            answer_tokens=sum(len(text.tokens) - text.num_prompt for text in data.texts),
            held_out_texts=len(data.held_out),
            trained_drafts=progress.num_drafts,
            training_s=progress.used_s,
            precision=precision,
            agreement=progress.best,
            coverage=float(np.isin(answers, data.tokens).mean()),
            gain=None if profile is None else self._expect_gain(shape, progress, profile),
        )

    def _expect_gain(self, shape: HeadShape, progress: TrainingProgress, profile: Profile) -> ExpectedGain:
        config = self.loaded.config
        read_bytes = float(read_manifest(self.work / _TARGET).weights_bytes)
        if "head" in self.loaded.tensors:  # else the vocabulary head is the embedding
            read_bytes -= INT8_BYTES * config.vocab_size * config.hidden_size
        draft_cost = estimate_draft_cost(shape.num_weights, read_bytes, profile)
        return expected_gain(progress.best, draft_cost, profile)
