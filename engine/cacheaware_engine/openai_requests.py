"""Reading OpenAI request bodies: JSON objects in, checked values out.

Every refusal names the field and is a 400 in OpenAI's shape. A field that is absent or null has its default. What this
engine does not do is refused by name when it is asked for; fields nobody here knows are ignored, as OpenAI-compatible
servers do. Pure: no I/O, no tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import BadRequest
from .fields import Fields, encodable, refuse
from .response_format import schema_of
from .sampling_params import MAX_LOGPROBS, SamplingParams

MAX_SEQUENCES = 128
MAX_PROMPTS = 256
MAX_STOPS = 16
MAX_BIASES = 300
MAX_STOP_LENGTH = 1024
MAX_MESSAGES = 10_000
INT64 = 2**63
COMPLETION_MAX_TOKENS = 16  # what OpenAI's completions endpoint makes when nothing is said

ROLES = ("system", "developer", "user", "assistant")

# Values that ask for nothing beyond what this engine does; any other value of these fields is refused.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_embeds": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded model and the settings bound."""

    vocab_size: int
    max_sequences: int
    structured_output: bool = False
    """Whether texts can be held to a schema."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Whom the request is charged to and whose blocks it may hit; set by the sidecar."""

    tier: str | None
    salt: bytes
    priority: int
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What both generating endpoints share. `max_tokens` None: as many as the context has room for."""

    model: str
    sampling: SamplingParams
    max_tokens: int | None
    max_tokens_field: str
    max_tokens_is_default: bool
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    n: int
    stream: bool
    include_usage: bool
    placement: Placement
    schema: str | None = None
    """The JSON schema, as JSON, that texts must follow."""
    prompt_logprobs: int | None = None
    """Tell how likely each token of the prompt was, and so many of the likeliest; None: do not."""


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatRequest:
    wanted: Wanted
    messages: tuple[Message, ...]


Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    wanted: Wanted
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """Either `prompt` or `messages` is given."""

    model: str | None
    prompt: str | None
    messages: tuple[Message, ...] | None
    add_special_tokens: bool
    add_generation_prompt: bool


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    model: str | None
    tokens: tuple[int, ...]


def chat_request(body: Mapping[str, Any], limits: Limits) -> ChatRequest:
    fields = Fields(body)
    wanted = _wanted(fields, limits, default_max_tokens=None, logprobs=_chat_logprobs(fields))
    return ChatRequest(wanted, messages(fields.required("messages"), "messages"))


def completion_request(body: Mapping[str, Any], limits: Limits) -> CompletionRequest:
    fields = Fields(body)
    asks = fields.get("logprobs") is not False  # some clients send the chats' way of saying no
    logprobs = fields.optional_integer("logprobs", 0, MAX_LOGPROBS) if asks else None
    wanted = _wanted(fields, limits, default_max_tokens=COMPLETION_MAX_TOKENS, logprobs=logprobs)
    return CompletionRequest(wanted, _prompts(fields.required("prompt"), limits))


def tokenize_request(body: Mapping[str, Any]) -> TokenizeRequest:
    fields = Fields(body)
    given = [name for name in ("prompt", "messages") if fields.get(name) is not None]
    if len(given) != 1:
        raise BadRequest("give exactly one of prompt and messages", param="prompt")
    return TokenizeRequest(
        model=fields.text("model"),
        prompt=fields.text("prompt"),
        messages=messages(body["messages"], "messages") if given == ["messages"] else None,
        add_special_tokens=fields.boolean("add_special_tokens", True),
        add_generation_prompt=fields.boolean("add_generation_prompt", True),
    )


def detokenize_request(body: Mapping[str, Any], limits: Limits) -> DetokenizeRequest:
    fields = Fields(body)
    tokens = fields.required("tokens")
    if not isinstance(tokens, list):
        refuse("tokens", "a list of token ids", tokens)
    return DetokenizeRequest(fields.text("model"), _token_ids(tokens, "tokens", limits.vocab_size))


def messages(value: Any, param: str) -> tuple[Message, ...]:
    """Chat messages; the text parts of one message are joined by newlines."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        refuse(param, "a list with at least one message", value)
    if len(value) > MAX_MESSAGES:
        raise BadRequest(f"{param}: at most {MAX_MESSAGES} messages, got {len(value)}", param=param)
    return tuple(_message(item, f"{param}[{i}]") for i, item in enumerate(value))


def _message(value: Any, param: str) -> Message:
    if not isinstance(value, Mapping):
        refuse(param, "an object with role and content", value)
    role, content = value.get("role"), value.get("content")
    if role in ("tool", "function") or value.get("tool_calls") or value.get("function_call"):
        raise BadRequest(f"{param}: tool calls are not supported by this engine", param=param)
    if role not in ROLES:
        refuse(f"{param}.role", f"one of {', '.join(ROLES)}", role)
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{param}.content[{i}]") for i, part in enumerate(content))
    elif content is None and role == "assistant":
        content = ""
    elif not isinstance(content, str):
        refuse(f"{param}.content", "a string or a list of text parts", content)
    # "developer" is the newer name of "system"; templates know the older one.
    return Message("system" if role == "developer" else role, encodable(content, f"{param}.content"))


def _part(value: Any, param: str) -> str:
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        refuse(param, "an object with a type", value)
    if value["type"] != "text":
        raise BadRequest(
            f"{param}.type: {value['type'][:40]!r} is not supported by this engine: only text parts are", param=param
        )
    if not isinstance(value.get("text"), str):
        refuse(f"{param}.text", "a string", value.get("text"))
    return str(value["text"])


def _prompts(value: Any, limits: Limits) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (encodable(value, "prompt"),)
    if not isinstance(value, list) or not value:
        refuse("prompt", "a string, a list of strings, token ids, or a list of lists of token ids", value)
    if not isinstance(value[0], (str, list)):
        return (_token_ids(value, "prompt", limits.vocab_size),)
    if len(value) > MAX_PROMPTS:
        raise BadRequest(f"prompt: at most {MAX_PROMPTS} prompts in a request, got {len(value)}", param="prompt")
    prompts: list[Prompt] = []
    for i, item in enumerate(value):
        if isinstance(value[0], str) and isinstance(item, str):
            prompts.append(encodable(item, f"prompt[{i}]"))
        elif isinstance(value[0], list) and isinstance(item, list):
            prompts.append(_token_ids(item, f"prompt[{i}]", limits.vocab_size))
        else:
            refuse(f"prompt[{i}]", "the same kind as prompt[0]", item)
    return tuple(prompts)


def _token_ids(value: list[Any], param: str, vocab_size: int) -> tuple[int, ...]:
    for i, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            refuse(f"{param}[{i}]", f"a token id from 0 to {vocab_size - 1}", token)
    return tuple(value)


def _wanted(fields: Fields, limits: Limits, default_max_tokens: int | None, logprobs: int | None) -> Wanted:
    for name, neutral in NEUTRAL.items():
        value = fields.get(name)
        if value is not None and not any(
            value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral
        ):
            raise BadRequest(
                f"{name} is not supported by this engine: leave it out", param=name, code="unsupported_parameter"
            )
    n = fields.integer("n", 1, 1, min(MAX_SEQUENCES, limits.max_sequences))
    if (best_of := fields.integer("best_of", n, 1, MAX_SEQUENCES)) != n:
        raise _unsupported("best_of", f"best_of must equal n ({n}) in this engine, got {best_of}")
    field = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    max_tokens = fields.optional_integer(field, 1, INT64 - 1)
    said = field in fields.body  # a null says: as many as fit
    stream = fields.boolean("stream", False)
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        refuse("stream_options", "an object", options)
    if options is not None and not stream:
        raise BadRequest("stream_options may only be given with stream: true", param="stream_options")
    min_tokens = fields.integer("min_tokens", 0, 0, INT64 - 1)
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadRequest(f"min_tokens ({min_tokens}) must not exceed {field} ({max_tokens})", param="min_tokens")
    return Wanted(
        model=fields.required_text("model"),
        sampling=SamplingParams(
            temperature=fields.number("temperature", 1.0, 0, 2),
            top_p=_top_p(fields),
            top_k=_top_k(fields),
            min_p=fields.number("min_p", 0.0, 0, 1),
            seed=fields.optional_integer("seed", -INT64, INT64 - 1),
            presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
            frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
            repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 10),
            logit_bias=_logit_bias(fields.get("logit_bias"), limits.vocab_size),
            logprobs=logprobs,
        ),
        max_tokens=default_max_tokens if max_tokens is None and not said else max_tokens,
        max_tokens_field=field,
        max_tokens_is_default=max_tokens is None,
        min_tokens=min_tokens,
        stop=_stops(fields.get("stop")),
        stop_token_ids=frozenset(_stop_ids(fields.get("stop_token_ids"), limits.vocab_size)),
        ignore_eos=fields.boolean("ignore_eos", False),
        n=n,
        stream=stream,
        include_usage=Fields(options, "stream_options.").boolean("include_usage", False) if options else False,
        placement=_placement(fields),
        schema=schema_of(fields, supported=limits.structured_output),
        prompt_logprobs=_prompt_logprobs(fields, stream),
    )


def _prompt_logprobs(fields: Fields, stream: bool) -> int | None:
    most = fields.optional_integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if most is not None and stream:
        raise BadRequest("prompt_logprobs cannot be given with stream: true", param="prompt_logprobs")
    return most


def _chat_logprobs(fields: Fields) -> int | None:
    """Chats say whether they want log-probabilities, and apart from that of how many other tokens."""
    wanted = fields.boolean("logprobs", False)
    most = fields.optional_integer("top_logprobs", 0, MAX_LOGPROBS)
    if most and not wanted:
        raise BadRequest("top_logprobs may only be given with logprobs: true", param="top_logprobs")
    return (most or 0) if wanted else None


def _logit_bias(value: Any, vocab_size: int) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > MAX_BIASES:
        refuse("logit_bias", f"an object of at most {MAX_BIASES} token ids and numbers", value)
    biases: dict[int, float] = {}
    for name in value:
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocab_size):
            refuse(f"logit_bias.{name[:40]}", f"a token id from 0 to {vocab_size - 1} as the name", name)
        biases[int(name)] = Fields(value, "logit_bias.").number(name, 0.0, -100, 100)
    return biases


def _unsupported(param: str, message: str) -> BadRequest:
    return BadRequest(message, param=param, code="unsupported_parameter")


def _top_p(fields: Fields) -> float:
    value = fields.number("top_p", 1.0, 0, 1)
    if value == 0:
        raise BadRequest("top_p: expected a number above 0 and at most 1, got 0", param="top_p")
    return value


def _top_k(fields: Fields) -> int | None:
    """0 and -1 both say "all tokens" in vLLM's API; inside, None does."""
    value = fields.integer("top_k", 0, -1, 2**31 - 1)
    return value if value > 0 else None


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        refuse("stop", f"a string or a list of at most {MAX_STOPS} strings", value)
    for i, stop in enumerate(stops):
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_LENGTH:
            refuse(f"stop[{i}]", f"a string of 1 to {MAX_STOP_LENGTH} characters", stop)
    return tuple(encodable(stop, "stop") for stop in stops)


def _stop_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_STOPS:
        refuse("stop_token_ids", f"a list of at most {MAX_STOPS} token ids", value)
    return _token_ids(value, "stop_token_ids", vocab_size)


def _placement(fields: Fields) -> Placement:
    extra = fields.get("vllm_xargs")
    if extra is not None and not isinstance(extra, Mapping):
        refuse("vllm_xargs", "an object", extra)
    own = Fields(extra or {}, "vllm_xargs.")
    tier = own.text("cacheaware_tier", 63)
    if tier is not None and not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", tier):
        refuse("vllm_xargs.cacheaware_tier", "a tier's name (lower-case letters, digits and hyphens)", tier)
    return Placement(
        tier=tier,
        salt=(fields.text("cache_salt", 1024) or "").encode(),
        priority=fields.integer("priority", 0, -(2**31), 2**31 - 1),
        group=own.text("cacheaware_group", 256),
    )
