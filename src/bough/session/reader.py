"""What a session does to a request before the engine has it: this needs the model's file, not its weights."""

import threading
from dataclasses import asdict, replace

from bough.engine.sampler import SamplingParams
from bough.engine.sequence import Limits, Request
from bough.errors import UsageError
from bough.hub.recommended import NOTHING_KNOWN, Recommended
from bough.images.opening import ImageLimits
from bough.images.parts import has_images, with_images
from bough.models.pooling import VectorSpec
from bough.session.compression import Compression, PromptCompression
from bough.session.pictures import Pictures
from bough.session.prompts import Prompts
from bough.session.requests import Prompt, TextRequest
from bough.session.vector_prompts import check_role, vector_prompt
from bough.text.grammar_process import GrammarProcesses
from bough.text.template import ChatTemplate
from bough.text.tokenizer import EncodeLimit, Tokenizer


class RequestReader:
    """Encodes and checks requests, within the limits of an engine here or in another process."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        limits: Limits,
        *,
        recommended: Recommended = NOTHING_KNOWN,
        break_loops: bool = True,
        compression: Compression | None = None,
        vector_spec: VectorSpec | None = None,
        images: ImageLimits | None = None,
    ):
        """`vector_spec`: of a model that generates no text; `images`: of one that sees. None: it does not."""
        self.tokenizer = tokenizer
        self.template = template
        self.limits = limits
        self.images = images
        self.vector_spec = vector_spec
        self.recommended = recommended
        pictures = None if images is None else Pictures(images)
        self._prompts = Prompts(
            tokenizer, template, break_loops=break_loops, sentences=recommended.sentences, pictures=pictures
        )
        self._compression = PromptCompression(self._prompts, tokenizer, compression or Compression())

    @property
    def caches_prefixes(self) -> bool:
        """Return whether what a request has processed is there for later ones, as far as is known here."""
        return True

    @property
    def max_ctx(self) -> int:
        return self.limits.max_ctx

    def sampling_for(self, thinking: bool | None, *, raw: bool = False) -> SamplingParams:
        """Return the sampling recommended for a request that thinks; None: as the model does by default.

        `raw`: for a prompt without the chat template, whose text, such as code, has to repeat itself.
        """
        values = asdict(self.recommended.sampling(thinking))
        if raw:
            values |= {"repetition_penalty": 1.0, "presence_penalty": 0.0}
        return SamplingParams(**values, recommended=not raw)

    @property
    def compresses(self) -> bool:
        """Return whether long prompts are compressed where a request does not say."""
        return self._compression.by_default

    def encode(self, request: TextRequest) -> list[int]:
        """Return the prompt's token ids, below 0 for images; raises if the template refuses the messages."""
        request = self._with_images(request)
        limit = self._limit(request, stops_at_tokens=False)
        return self._prompts.encode(request, limit, counting=True).ids

    def check(self, request: TextRequest) -> TextRequest:
        """Return the request with its encoded prompt; raise what `generate` would before its first step.

        It can run in another thread than `generate`.
        """
        request = self._with_images(request)
        if request.prefill_for_s is None and self._compression.deferred(request):
            if has_images(request.messages):
                self._prompts.encode(request, self._limit(request))  # images are decoded in this thread
            return request
        request = self.prepare(request)
        prompt = request.encoded
        assert prompt is not None
        if request.vector is not None:
            self.limits.check(Request(prompt.ids, max_tokens=1))
            return request
        if request.prefill_for_s is None:
            prompt = replace(prompt, grammar=self._prompts.grammar(request, prompt))
        self.limits.check(self._engine_request(request, prompt))
        return replace(request, encoded=prompt)

    def isolate_grammars(self) -> None:
        """Compile grammars in processes that end with their limits, as a server's clients send any."""
        processes = GrammarProcesses(self.tokenizer)
        self._prompts.grammars.resolve = processes.resolve
        threading.Thread(target=processes.start, name="grammars", daemon=True).start()

    def scores(self, request: TextRequest) -> bool:
        """Return whether `check` lets a model score the prompt, which takes long."""
        return request.prefill_for_s is None and self._compression.scored_by_model(request)

    def prepare(self, request: TextRequest) -> TextRequest:
        """Return the request with its encoded prompt, compressed if that is wanted."""
        check_role(request, self.vector_spec)
        request = self._with_images(request)
        if self.vector_spec is not None:
            prompt = vector_prompt(request, self.vector_spec, self.tokenizer, self._limit(request))
            return replace(request, encoded=prompt)
        if request.prefill_for_s is not None:
            return replace(request, encoded=self._beginning(request))
        return replace(request, encoded=self._compression.encode(request, self._limit(request)))

    def _with_images(self, request: TextRequest) -> TextRequest:
        """Return the request with its images read; what follows sees none of their base64 text."""
        if request.messages is None:
            return request
        return replace(request, messages=with_images(request.messages, self.images))

    def _beginning(self, request: TextRequest) -> Prompt:
        """Return the beginning of a prompt that prefill can process before the rest is there."""
        if not self.caches_prefixes:
            raise UsageError("the prefix cache is off, and holds nothing for later", "set `prefix_cache`")
        prompt = self._prompts.beginning(request, self._limit(request))
        self._compression.check_read_whole(request, len(prompt.ids))
        return prompt

    def _limit(self, request: TextRequest, *, stops_at_tokens: bool = True) -> EncodeLimit:
        return EncodeLimit(self.max_ctx, request.cancelled, stops_at_tokens, self.limits.raisable)

    def _engine_request(self, request: TextRequest, prompt: Prompt, *, may_stop: bool = True) -> Request:
        if request.prefill_for_s is not None:
            return Request(
                prompt.ids,
                max_tokens=1,
                boundaries=prompt.boundaries,
                prefill_for_s=request.prefill_for_s,
                images=prompt.images,
            )
        room = self.max_ctx - len(prompt.ids) + 1
        ends = frozenset() if request.ignore_eos else self.tokenizer.stop_ids
        return Request(
            prompt=prompt.ids,
            max_tokens=max(1, room) if request.max_tokens is None else request.max_tokens,
            sampling=request.sampling,
            stop_ids=request.stop_token_ids | ends,
            may_stop=may_stop,
            constraint=self._prompts.constraint(request, prompt),
            draft_budget=request.draft_budget,
            trees=request.trees,
            boundaries=prompt.boundaries,
            images=prompt.images,
        )
