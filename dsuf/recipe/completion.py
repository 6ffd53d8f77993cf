"""Raw text completion, and completion in the middle of a text: no roles, no reasoning, no calls.

The library has no type for it. It gets the fields that a chat has too, as a chat without a message, and so checks them
in its own words and finds stop strings as it does there; prompt and reply are not a chat's.
"""

from functools import partial
from typing import Any

import msgspec
from deepseek_recipe import (
    ChatCompletionRequest,
    ConversationRequest,
    ParsingOptions,
    SpecialToken,
    SpecialTokens,
    ThinkingInitialStage,
)

from dsuf.errors import InvalidRequest, UnsupportedFeature
from dsuf.recipe.conversion import Conversion, generate_chat
from dsuf.recipe.forms import CompletionForm
from dsuf.recipe.names import conversion_options
from dsuf.recipe.vocabulary import Vocabulary

_SHARED = (
    "model", "max_tokens", "temperature", "top_p", "stop", "seed", "stream", "stream_options", "n",
    "frequency_penalty", "presence_penalty",
)  # fmt: skip
_MIDDLE = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
# Spellings that no reply has, so that the reader takes all there is for text.
_NO_MARKS = SpecialTokens(thinking_start="\0a", thinking_end="\0b", dsml="\0c", eos="\0d", bos="\0e")


class CompletionFields(msgspec.Struct):
    """What a completion has beyond the fields of a chat. `prompt` is text or ids, or a list of one such."""

    prompt: Any = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class RawConversion(Conversion):
    """A prompt that is taken as it stands."""

    def __init__(self, model: str, request: ConversationRequest, fields: CompletionFields, top_p: float | None) -> None:
        self._written = CompletionForm()
        super().__init__(model, request, self._written, partial(generate_chat, request, model))
        self._prompt, self._suffix = _find_prompt(fields.prompt), fields.suffix or ""
        self._top_p = None if top_p is None else float(top_p)
        self._echoes = bool(fields.echo)

    @property
    def options(self) -> ParsingOptions:
        """All is text; it may begin with line ends."""
        stops = self.request.parsing_options.stop_sequences
        stage = ThinkingInitialStage.ContentContinuation
        return ParsingOptions(
            parse_tool_calls=False, thinking_initial_stage=stage, stop_sequences=stops, special_tokens=_NO_MARKS
        )

    @property
    def top_p(self) -> float | None:
        """As it was sent: the model's rule for it is one of chats."""
        return self._top_p

    def count_characters(self, vocabulary: Vocabulary) -> int:
        """Length of the text, or as many characters as so many ids can have."""
        per_item = 1 if isinstance(self._prompt, str) else vocabulary.longest_token
        return len(self._prompt) * per_item + len(self._suffix)

    def encode(self, vocabulary: Vocabulary) -> list[int]:
        """Ids of the prompt, with the token that begins a text before it unless it is there.

        In a prompt the spellings of special tokens become these tokens, as a raw prompt has no other way to have them;
        in the two sides of a gap they stay text. Raises `InvalidRequest` or `UnsupportedFeature`.
        """
        ids = self._encode_prompt(vocabulary) if not self._suffix else self._encode_sides(vocabulary)
        if self._echoes:
            self._written.echo = self._prompt if isinstance(self._prompt, str) else vocabulary.decode(self._prompt)
        begin = vocabulary.specials[vocabulary.special_tokens.token(SpecialToken.Bos)]
        return ids if ids[:1] == [begin] else [begin, *ids]

    def _encode_prompt(self, vocabulary: Vocabulary) -> list[int]:
        """Ids of a plain prompt."""
        if isinstance(self._prompt, str):
            return vocabulary.encode(self._prompt)
        vocabulary.check(self._prompt, "prompt")
        return list(self._prompt)

    def _encode_sides(self, vocabulary: Vocabulary) -> list[int]:
        """Ids of the texts around a gap, in the order in which the tokenizer's marks are meant."""
        if not isinstance(self._prompt, str):
            raise InvalidRequest("with `suffix`, `prompt` must be text", param="prompt")
        if any(mark not in vocabulary.specials for mark in _MIDDLE):
            raise UnsupportedFeature("`suffix` is not served: the tokenizer has no marks for it", param="suffix")
        begin, hole, end = [vocabulary.specials[mark] for mark in _MIDDLE]
        sides = [vocabulary.encode_text(text) for text in (self._prompt, self._suffix)]
        return [begin, *sides[0], hole, *sides[1], end]


def convert_completion(body: bytes, vocabulary: Vocabulary) -> Conversion:
    """Read a body of `/v1/completions`; raises `InvalidRequest`, and what the library raises."""
    try:
        sent = msgspec.json.decode(body)
        fields = msgspec.convert(sent, CompletionFields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"invalid request body: {error}") from error
    incoming = ChatCompletionRequest(msgspec.json.encode(_as_chat(sent, fields)))
    model = incoming.model
    request = incoming.convert(conversion_options(vocabulary.special_tokens, model))
    _check_together(fields)
    return RawConversion(model, request, fields, sent.get("top_p"))


def _as_chat(sent: dict[str, Any], fields: CompletionFields) -> dict[str, Any]:
    """A chat body with the fields that a chat has too."""
    chat = {name: sent[name] for name in _SHARED if name in sent}
    chat |= {"messages": [{"role": "user", "content": ""}], "thinking": {"type": "disabled"}}
    if fields.logprobs is not None:
        chat |= {"logprobs": True, "top_logprobs": fields.logprobs}
    return chat


def _check_together(fields: CompletionFields) -> None:
    """Refuse fields that do not go together; raises `InvalidRequest`."""
    if fields.best_of not in (None, 1):
        raise UnsupportedFeature("`best_of` is served as 1 only", param="best_of")
    if fields.echo and (fields.suffix or fields.logprobs is not None):
        raise InvalidRequest("`echo` goes neither with `suffix` nor with `logprobs`", param="echo")


def _find_prompt(prompt: Any) -> str | list[int]:
    """The one prompt, as text or ids; raises `InvalidRequest`."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    if isinstance(prompt, list) and len(prompt) > 1 and all(isinstance(one, str | list) for one in prompt):
        raise UnsupportedFeature("one `prompt` a request is served", param="prompt")
    raise InvalidRequest("`prompt` must be text, token ids, or a list of one such", param="prompt")
