"""From a target to a head that drafts for it: prompts, answers, hidden states, training, report.

All that is made lies in a folder beside the head, so that an interrupted training goes on where it ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic

import numpy as np

from edgespec import (
    EdgeSpecError,
    Engine,
    LocalSource,
    MemoryExhausted,
    Profile,
    Report,
    TokenIds,
    UsageError,
    read_manifest,
)
from edgespec.export.sources import read_source
from edgespec.system.console import show_progress
from edgespec.system.disk import replace_file
from edgespec.system.units import format_time
from edgespec.training.checkpoint import TrainingProgress
from edgespec.training.fit import Data, Recipe, Trainer, find_device
from edgespec.training.head_file import WEIGHTS, read_weights, write_head
from edgespec.training.network import HeadShape
from edgespec.training.objective import (
    INT8_BYTES,
    ExpectedGain,
    TrainingReport,
    estimate_draft_cost,
    expected_gain,
)
from edgespec.training.packing import Floats, Text
from edgespec.training.state_rows import StateRows
from edgespec.training.stored_texts import read_tokens
from edgespec.training.target_run import TargetRun, Written
from edgespec.training.torch_target import is_out_of_memory
from edgespec.training.warm_start import (
    FittedRows,
    choose_tokens,
    expected_counts,
    fit_join,
    head_shape,
    matrix,
    sample_rows,
    start_weights,
)
from edgespec.training.work_folder import TrainingOptions, WorkFolder, describe_run, hold_work, work_folder_of

_TRAINING_SHARE, _LEAST_TRAINING_S = 0.4, 10.0  # of the time, at least
_COUNTED_ROWS, _GPU_COUNTED_ROWS, _READ_AT_ONCE = 16_000, 200_000, 8192  # to choose the tokens to draft


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
    sha256: str = "",
) -> TrainingReport:
    """Train a head and write it to output; the folder OUTPUT.work has what another run goes on from.

    Args:
        source: Of the target.
        prompts: That the target answers.
        stored: Prompts, or their ends, and answers that it wrote earlier, in their place.
        open_engine: Loads the target to answer.
        sha256: Of the source that this target was exported from, if that is known.

    Raises:
        UsageError: There is too little text, the folder is of another training, or the source of another target.
        SourceError: The source is damaged or unsupported.
        DeviceUnavailable: PyTorch has no such device here.
        MemoryExhausted: There is too little memory.
        DiskFull: There is no room.
    """
    began = monotonic()
    require_torch()
    find_device(options.device)
    prompts = _leave_out(prompts, {*options.held_out}, report)
    loaded = read_source(source.path)
    if sha256 not in ("", loaded.source.sha256):
        raise UsageError(
            f"the model was made of other weights than {source.path} has, such as with an adapter; export a "
            "source that has all its weights, and train for that"
        )
    work = work_folder_of(output)
    with hold_work(work, output, describe_run(loaded, options, prompts)):
        folder = WorkFolder(work, loaded, options)
        target_name = source.origin.repository or loaded.source.name
        try:
            written = TargetRun(folder, source, report).run(prompts, stored, open_engine)
            return HeadTraining(folder, output, target_name, report).run(written, began)
        except KeyboardInterrupt:
            best = (
                f"the best head so far is in {output}" if (output / WEIGHTS).is_file() else "there is no head yet"
            )
            report(f"{best}; what was made for it is in {work}, and the same command goes on")
            raise
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            problem = str(error).partition("\n")[0] or "out of memory"
            raise MemoryExhausted(
                f"there is no memory for the training ({problem}); what was made is in {work}. End other "
                "programs, or choose another --train-device or a smaller --draft-vocab"
            ) from None


def _leave_out(prompts: list[str], held_out: set[str], report: Report) -> list[str]:
    """The prompts that are not held out; raises UsageError: All are."""
    others = [each for each in prompts if each not in held_out]
    if prompts and not others:
        raise UsageError("all prompts of --corpus are held out; give others")
    if num := len(prompts) - len(others):
        report(f"left out {num} prompts that are held out")
    return others


@dataclass(frozen=True)
class HeadTraining:
    """A head that learns from the texts and states of a folder.

    output: The folder of the head. target_name: As the head's config.json has it.
    """

    folder: WorkFolder
    output: Path
    target_name: str
    report: Report

    def run(self, written: Written, began: float) -> TrainingReport:
        held_out, trained = self.folder.split(written.texts)
        if num := len(written.texts) - len(held_out) - len(trained):
            self.report(f"left out {num} texts whose prompts are held out")
        shape, data, start = self.prepare(trained, held_out, written.rows, self.folder.options.recipe)
        layers = self.folder.layers[-shape.num_states : -1]
        trainer = Trainer(
            shape,
            data,
            start,
            self.folder.checkpoint,
            partial(write_head, self.output, shape, tokens=data.tokens, target=self.target_name, layers=layers),
            self.folder.options.device,
            saved=read_weights(self.output, shape) if (self.output / WEIGHTS).is_file() else None,
            recipe=self.folder.options.recipe,
        )
        wanted_s = 60 * self.folder.options.minutes
        left_s = max(_LEAST_TRAINING_S, _TRAINING_SHARE * wanted_s, wanted_s - (monotonic() - began))
        self.report(
            f"training a head of {shape.num_weights / 1e6:.1f} M weights on {len(trained)} texts on "
            f"{trainer.device}, in {trainer.precision}, for at most {format_time(left_s)}; "
            "Ctrl-C keeps what is trained"
        )
        trainer.run(left_s)
        return self._describe(shape, data, trainer, written.profile)

    def prepare(
        self, trained: list[Text], held_out: list[Text], rows: StateRows, recipe: Recipe
    ) -> tuple[HeadShape, Data, dict[str, Floats]]:
        """The head's sizes, what it is trained on, and the weights from which it starts."""
        config, sample = self.folder.loaded.config, rows.sample(trained)
        embedding = matrix(self.folder.loaded.tensors["embedding"])
        head = matrix(self.folder.loaded.head) if "head" in self.folder.loaded.tensors else embedding
        tokens = self._tokens(rows, sample, head)
        num_states = min(recipe.num_states, len(self.folder.layers))  # of a target with few layers
        shape = head_shape(self.folder.loaded, len(tokens), num_states, recipe.markov_rank)
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
        matrices = self._fit_join(rows, sample, embedding, num_states)
        return shape, data, start_weights(shape, self.folder.loaded, head, tokens, *matrices)

    def _fit_join(
        self, rows: StateRows, trained: Sequence[Text], embedding: Floats, num_states: int
    ) -> tuple[Floats, Floats]:
        show_progress("finding the weights to start from")
        size = self.folder.loaded.config.hidden_size
        # Of answers alone: with the prompts' rows beside them the start is worse (docs/log/training.md).
        ends = [(max(1, text.num_prompt), len(text.tokens)) for text in trained]
        places = np.concatenate([text.start + np.arange(*each) for text, each in zip(trained, ends, strict=True)])
        tokens = np.concatenate([text.tokens[slice(*each)] for text, each in zip(trained, ends, strict=True)])

        def read(part: slice) -> FittedRows:
            before, at = rows.at(np.stack([places[part] - 1, places[part]]))
            states, wanted = before[:, -num_states * size :], at[:, -2 * size : -size]
            return FittedRows(embedding[tokens[part]], states.float().cpu().numpy(), wanted.float().cpu().numpy())

        return fit_join(map(read, sample_rows(len(places), size, num_states)), self.folder.loaded.config.rms_eps)

    def _tokens(self, rows: StateRows, trained: Sequence[Text], head: Floats) -> TokenIds:
        """The tokens that can be drafted; those of the first run, if another one goes on with it."""
        path, config, device = self.folder.tokens, self.folder.loaded.config, self.folder.device
        if path.exists():
            return read_tokens(path, config.vocab_size)
        show_progress("choosing the tokens that can be drafted")
        before = [
            np.arange(text.start + text.num_prompt - 1, text.start + len(text.tokens) - 1) for text in trained
        ]
        places = np.concatenate(before)
        most = _COUNTED_ROWS if device == "cpu" else _GPU_COUNTED_ROWS
        places = places[:: -(-len(places) // most)]
        parts = (places[start : start + _READ_AT_ONCE] for start in range(0, len(places), _READ_AT_ONCE))
        states = (rows.at(part)[:, -config.hidden_size :].to(device) for part in parts)
        counts = expected_counts(states, head, config.logit_scale, config.logit_cap, device)
        size = min(self.folder.options.draft_vocab_size, config.vocab_size)
        tokens = choose_tokens(counts, size, self.folder.loaded.vocabulary.eos_token_ids)
        replace_file(path, tokens.astype("<i4").tobytes())
        show_progress("")
        return tokens

    def _describe(self, shape: HeadShape, data: Data, trainer: Trainer, profile: Profile | None) -> TrainingReport:
        progress = trainer.progress
        answers = np.concatenate([text.tokens[text.num_prompt :] for text in data.held_out])
        return TrainingReport(
            texts=len(data.texts),
            answer_tokens=sum(len(text.tokens) - text.num_prompt for text in data.texts),
            held_out_texts=len(data.held_out),
            compared_texts=len(trainer.compared),
            compared_drafts=trainer.compared_drafts,
            drafts=trainer.num_a_round,
            trained_drafts=progress.num_drafts,
            training_s=progress.used_s,
            precision=trainer.precision,
            agreement=progress.best,
            coverage=float(np.isin(answers, data.tokens).mean()) if len(answers) else 0.0,
            gain=None if profile is None else self._expect_gain(shape, progress, profile),
        )

    def _expect_gain(self, shape: HeadShape, progress: TrainingProgress, profile: Profile) -> ExpectedGain:
        config = self.folder.loaded.config
        read_bytes = float(read_manifest(self.folder.target).weights_bytes)
        if "head" in self.folder.loaded.tensors:  # else the vocabulary head is the embedding
            read_bytes -= INT8_BYTES * config.vocab_size * config.hidden_size
        draft_cost = estimate_draft_cost(shape.num_weights, read_bytes, profile)
        return expected_gain(progress.best, draft_cost, profile)
