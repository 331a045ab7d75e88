"""The parts that load() opens for an engine: its target, and the drafters beside it."""

from dataclasses import dataclass, field

from edgespec.draft.answer_cache import AnswerCache
from edgespec.draft.pool import DrafterPool
from edgespec.draft.speculation import Speculation
from edgespec.engine.embedder import Embedder
from edgespec.engine.generation import Generation
from edgespec.engine.idle_learner import IdleLearner
from edgespec.manifest import Manifest
from edgespec.setup.usage import UsageCounter
from edgespec.text.prompt_encoder import PromptEncoder


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """The target of an engine: its description, and the encoder that reads texts.

    device_names: Of target and drafter.
    near_tie: As Generation has it.
    embedder: Of a model that was trained for embeddings, which writes no text.
    """

    manifest: Manifest
    encoder: PromptEncoder
    device_names: tuple[str, str] = ("cpu", "cpu")
    is_deterministic: bool = False
    near_tie: float | None = None
    embedder: Embedder | None = None


@dataclass(frozen=True, kw_only=True)
class OpenDrafters:
    """The drafters of an engine, and all that was learned of them."""

    speculation: Speculation = field(default_factory=Speculation)
    pool: DrafterPool = field(default_factory=DrafterPool)
    answers: AnswerCache | None = None
    learner: IdleLearner | None = None
    counter: UsageCounter | None = None

    def generation(self, model: LoadedModel) -> Generation:
        """The maker of answers with a model and these drafters."""
        return Generation(
            tokenizer=model.encoder.tokenizer,
            end_tokens=model.manifest.eos_token_ids,
            speculation=self.speculation,
            pool=self.pool,
            answers=self.answers,
            device_names=model.device_names,
            near_tie=model.near_tie,
            learner=self.learner,
            counter=self.counter,
        )

    def report(self) -> None:
        """Report what has changed in the time without answers."""
        self.pool.report_changes()
        if self.learner:
            self.learner.report_problem()

    def close(self) -> None:
        """Free the models, once what was learned is kept."""
        if self.learner:
            self.learner.close()
        self.speculation.close()
        self.pool.close()
        if self.answers:
            self.answers.save()
        if self.counter:
            self.counter.close()
