"""From a prompt and the options of its answer to a request, which one model can answer."""

from dataclasses import dataclass
from functools import cached_property

from edgespec.engine.answer_grammars import AnswerGrammars, call_reading
from edgespec.engine.drafting import choose_drafters
from edgespec.engine.model_reasoning import ModelReasoning
from edgespec.engine.request import AnswerSettings, Request, require_answerable, require_writer
from edgespec.errors import UsageError
from edgespec.manifest import Manifest
from edgespec.policy.speculation import ALL_DRAFTERS
from edgespec.tokenization.banned_texts import BannedTexts, SpellingIndex
from edgespec.tokenization.prompt_encoder import Prompt, PromptEncoder
from edgespec.tools.tool import ToolUse
from edgespec.types import TokenMask, append


@dataclass(kw_only=True)
class RequestReader:
    """Encodes prompts for one model, and checks whether it can answer them as it is asked to.

    greedy_device: The target's device where only greedy text is exact; None where all text is, or none has to be.
    """

    encoder: PromptEncoder
    manifest: Manifest
    greedy_device: str | None = None

    def __post_init__(self) -> None:
        self.reasoning = ModelReasoning(self.encoder, self.manifest)
        self._grammars = AnswerGrammars(self.encoder.tokenizer, self.manifest)

    def read(
        self, prompt: Prompt, options: AnswerSettings, open_drafters: tuple[str, ...], target_context: int
    ) -> Request:
        """The request; raises what Engine.stream raises before any work.

        Args:
            open_drafters: The names of those that may draft.
            target_context: The most tokens that the target takes, which may be fewer than the encoder's.
        """
        require_writer(self.manifest)
        encoder, context = self.encoder, self.encoder.context_length
        use = ToolUse.parse(options.tools, options.tool_choice, is_parallel=options.parallel_tool_calls)
        tokens = encoder.encode(
            prompt,
            options.system,
            raw=options.raw,
            tools=use.tools if use else (),
            thinking=options.thinking,
            is_bounded=True,
        )
        begun = encoder.encode_prefill(() if options.prefill is None else options.prefill)
        drafters = ALL_DRAFTERS
        if options.drafting is not None:
            before = append(tokens, begun)
            drafters = choose_drafters(options.drafting, open_drafters, before, encoder.tokenizer, context)
        calls = None
        if use:
            calls = call_reading(use, encoder.tool_template.format, whole=options.whole_tool_calls)
            calls = calls._replace(opens_reasoning=self.reasoning.is_open(tokens))
        request = Request(tokens, options, begun, drafters, self._mask_of(options), calls=calls)
        require_answerable(request, self.manifest, context)
        self._require_exact(request)
        budget = options.thinking_budget
        if budget is not None:
            self.reasoning.require_budget_possible(use, options.response_format, options.banned_texts)
        request = self._grammars.constrain(request, options.response_format, min(context, target_context))
        return request if budget is None else self.reasoning.bounded(request, budget)

    def _mask_of(self, options: AnswerSettings) -> TokenMask | None:
        banned = options.banned_texts
        if "" in banned:
            raise UsageError("banned has an empty text, which every answer holds; wanted at least one character")
        return BannedTexts(banned, self._spelling_index) if banned else None

    @cached_property
    def _spelling_index(self) -> SpellingIndex:
        return SpellingIndex(self.encoder.tokenizer.spellings, self.manifest.vocab_size)

    def _require_exact(self, request: Request) -> None:
        if self.greedy_device is not None and not request.sampling.is_greedy:
            raise UsageError(
                f"the temperature is {request.sampling.temperature}, and exact covers greedy text only on "
                f"'{self.greedy_device}', where deterministic mode is off; use temperature 0, or leave out exact"
            )
