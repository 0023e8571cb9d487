"""Request bodies of the protocols; unknown fields are accepted and ignored."""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bough.errors import UsageError

MAX_NESTING = 100
# Far above what clients send; each message costs some 15 us to render, each entry some 5 us to apply.
MAX_LENGTHS = {"messages": 10_000, "input": 10_000, "tools": 2_000, "logit_bias": 10_000, "stop": 1_000}
MAX_UNKNOWN = 1_000  # entries of an unknown field that is still checked
Object = dict[str, Any]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _check_json(cls, document: Any) -> Any:
        """Reject values that Python's parser accepts but JSON cannot represent: responses echo them."""
        for name, value in document.items() if isinstance(document, dict) else ():
            if isinstance(value, dict | list):
                # Unknown fields are neither used nor returned.
                if name not in cls.model_fields and len(value) > MAX_UNKNOWN:
                    continue
                _check_length(value, name)
                _check(value, name, MAX_NESTING)
        return document

    @property
    def extras(self) -> Object:
        return self.model_extra or {}


def _check_length(value: Object | list[Any], name: str) -> None:
    limit = MAX_LENGTHS.get(name)
    if isinstance(value, list) and isinstance(next(iter(value), None), int):
        return  # token ids cost little, and the context limits them
    if limit is not None and len(value) > limit:
        raise UsageError(f"{name} has {len(value)} entries; needs at most {limit}", param=name)


def _check(value: Any, name: str, depth: int) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} has a number that is not finite; JSON has none", param=name)
    if isinstance(value, dict | list):
        if not depth:
            raise UsageError(f"{name} has more than {MAX_NESTING} levels of nested objects", param=name)
        for part in value.values() if isinstance(value, dict) else value:
            _check(part, name, depth - 1)


class ModelBody(Body):
    model: str | None = None


COMPRESS = "Read less of a long prompt: off, auto, on, or an object with mode, above, to, query and keep."


class Extension(Body):
    """Bough's additions to a protocol, under the name `bough`."""

    trees: bool = Field(False, description="Send the tree of every step in the chunks.")
    budget: int | None = Field(None, ge=0, le=63, description="Most draft tokens a step; 0: plain decoding.")
    break_loops: bool = Field(True, description="End reasoning and answers that repeat themselves.")


class SamplingFields(Body):
    """What OpenAI's and Ollama's protocols call the same."""

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: int | None = None
    min_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repeat_penalty: Number | None = Field(None, description="llama.cpp's name of repetition_penalty.")
    seed: int | None = None
    stop: str | list[str] | None = None


class SamplingBody(SamplingFields, ModelBody):
    """Fields that chat and text completions share."""

    stream: bool | None = None
    stream_options: Object | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    stop_token_ids: list[int] | None = Field(None, description="Tokens that end the text.")
    ignore_eos: bool | None = Field(None, description="End tokens do not end the text.")
    min_tokens: int | None = None
    max_tokens: int | None = None
    n_predict: int | None = Field(None, description="llama.cpp's name of max_tokens.")
    n: int | None = Field(None, ge=1, le=128)
    response_format: Object | None = None
    structured_outputs: Object | None = Field(None, description="One of json, regex, choice, grammar.")
    json_schema: bool | Object | None = Field(None, description="llama.cpp: the JSON schema of the text.")
    grammar: str | None = Field(None, description="llama.cpp: a GBNF or Lark grammar of the text.")
    guided_json: bool | str | Object | None = Field(None, description="vLLM: the JSON schema of the text.")
    guided_choice: list[str] | None = Field(None, description="vLLM: the text is one of these.")
    guided_regex: str | None = Field(None, description="vLLM: the text matches this expression.")
    guided_grammar: str | None = Field(None, description="vLLM: a GBNF or Lark grammar of the text.")
    timings: bool | None = Field(None, description="Return llama.cpp's timings object.")
    timings_per_token: bool | None = Field(None, description="The same, by llama.cpp's name.")
    compress: bool | str | Object | None = Field(None, description=COMPRESS)
    bough: Extension | None = None


class ChatBody(SamplingBody):
    messages: list[Object] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Object] | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Object | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = Field(None, ge=0)
    continue_final_message: bool | None = Field(
        None, description="Continue the last message; by default if it is the assistant's text."
    )
    modalities: list[str] | None = None
    audio: Object | None = None
    functions: list[Object] | None = None
    function_call: str | Object | None = None


class CompletionBody(SamplingBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class LlamaBody(SamplingBody):
    """Fields of llama.cpp's own routes."""

    samplers: list[str] | str | None = Field(None, description="Samplers in use; the others are off.")
    response_fields: list[str] | None = Field(
        None, description="Paths of fields to return: timings/prompt_n."
    )


class LlamaCompletionBody(LlamaBody):
    prompt: str | list[int]


class InfillBody(LlamaBody):
    input_prefix: str = Field(description="The text before the gap.")
    input_suffix: str = Field(description="The text after it.")
    input_extra: list[Object] | None = Field(None, description="Other files: filename and text.")
    prompt: str = Field("", description="The beginning of the gap's text.")
    n_indent: int | None = Field(None, description="The text ends before a line that is indented less.")
    t_max_predict_ms: Number | None = Field(None, description="After this time the text ends with its line.")


class EmbeddingBody(ModelBody):
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1, description="Keep this many values, normalised again.")


class RerankBody(ModelBody):
    query: str
    documents: list[str | Object] = Field(min_length=1, description="Texts, or objects with a text.")
    top_n: int | None = Field(None, ge=1)
    return_documents: bool | None = None


class AnswerBody(ModelBody):
    """Fields that responses and Anthropic's messages share."""

    stream: bool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    tools: list[Object] | None = None
    compress: bool | str | Object | None = Field(None, description=COMPRESS)
    bough: Extension | None = None


class ResponsesBody(AnswerBody):
    input: str | list[Object]
    instructions: str | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    max_output_tokens: int | None = None
    tool_choice: str | Object | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Object | None = None
    text: Object | None = None
    include: list[str] | None = None
    metadata: Object | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: str | Object | None = None
    prompt: Object | None = None


class MessagesBody(AnswerBody):
    messages: list[Object] = Field(min_length=1)
    system: str | list[Object] | None = None
    max_tokens: int | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    output_config: Object | None = None
    output_format: Object | None = None


class PrefillBody(ModelBody):
    """The beginning of a request in any protocol: chat, text, responses or Anthropic's messages."""

    messages: list[Object] | None = Field(None, description="Of a chat, or Anthropic's with `system`.")
    system: str | list[Object] | None = Field(None, description="Anthropic's system prompt.")
    prompt: str | list[int] | None = Field(None, description="Of a text completion.")
    input: str | list[Object] | None = Field(None, description="Of a response.")
    lifetime: Number = Field(300, gt=0, le=3600, description="Seconds to read, and to keep what is not used.")


class TokenizeBody(Body):
    """Either text, or a conversation to be rendered by the chat template."""

    content: str | None = None
    messages: list[Object] | None = None
    tools: list[Object] | None = None
    add_special: bool = Field(False, description="Prepend the BOS token, if the model has one.")
    with_pieces: bool = Field(False, description="Return each token's text, too; bytes that are no text.")


class DetokenizeBody(Body):
    tokens: list[int]


class TemplateBody(Body):
    messages: list[Object] = Field(min_length=1)
    tools: list[Object] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None
    chat_template_kwargs: Object | None = None


class OllamaOptions(SamplingFields):
    """What Ollama calls options; others of its options belong to loading and are ignored."""

    num_predict: int | None = Field(None, description="Most tokens; -1: no limit.")


class OllamaBody(ModelBody):
    """Fields that Ollama's chat and generate share."""

    stream: bool = True
    options: OllamaOptions = OllamaOptions()
    format: str | Object | None = Field(None, description="json, or a JSON schema.")
    think: bool | str | None = None
    compress: bool | str | Object | None = Field(None, description=COMPRESS)


class OllamaChatBody(OllamaBody):
    messages: list[Object]
    tools: list[Object] | None = None


class OllamaGenerateBody(OllamaBody):
    prompt: str = ""
    system: str | None = None
    raw: bool = False
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: Any = Field(None, description="A list of images in base64.")


class OllamaEmbedBody(ModelBody):
    input: str | list[str] = ""
    truncate: bool = Field(False, description="Leave out the end of an input that is too long.")
    dimensions: int | None = Field(None, ge=1)


class OllamaEmbeddingsBody(ModelBody):
    """The old route, of one text, whose vector is not normalised."""

    prompt: str = ""


class OllamaShowBody(ModelBody):
    name: str | None = Field(None, description="The old name of model.")
