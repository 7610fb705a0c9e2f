"""A model's text side: prompts to token ids, and what is needed to turn token ids back into text.

The agent creates it once per model; it is immutable and thread-safe. `worker.text.choice` has the
state that changes while a choice runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from tokenizers import AddedToken, Tokenizer

from ryzanstein import errors
from ryzanstein.errors import FieldViolation, RyzansteinError
from ryzanstein.files.model_paths import model_location, model_name
from ryzanstein.generation.prompts import ChatPrompt, Message, Prompt, TextPrompt, TokenPrompt
from ryzanstein.generation.tools import ToolMode
from ryzanstein.worker.text.calling import Calling
from ryzanstein.worker.text.control import ControlTokens, token_ids
from ryzanstein.worker.text.detokenizer import Detokenizer, Vocabulary
from ryzanstein.worker.text.infill import Infill, arranged, format_of
from ryzanstein.worker.text.model_files import FLAGS, ModelFiles, answer_tokens, model_invalid, sampling_defaults
from ryzanstein.worker.text.templates.renderer import LocalRenderer
from ryzanstein.worker.text.templates.rendering import Rendered, TemplateSource
from ryzanstein.worker.text.templates.sandbox import parse

MAX_CHARS_PER_TOKEN = 16
MAX_TEMPLATE_CHARS = 2**20
_MARK = "☺"
"""A character that no token joins with others: what is encoded behind it has no space put before it."""
_TEMPLATE_OVERHEAD = 2
"""What a template may write, as a multiple of what messages may have."""


class TextModel:
    """The text side of one model on a node.

    `path` is where its files are, `template_file` that of a chat template other than its own.
    `context_length` is the model's own, in tokens; `vocab_size` bounds the ids that it can read;
    `eos_token_ids` end an answer, and so do `answer_tokens` where a request sets no other bound.
    `embedding`: how it makes vectors instead of text, if it does.
    `template` is the chat template, which is not run here; None: it has none. `tool_template` is that of
    conversations with tools, and `calling` how functions are called in these.
    """

    def __init__(self, files: ModelFiles, name: str, calling: tuple[str, str] = ("auto", "auto")) -> None:
        self.name = name
        self.path = str(files.directory)
        self.template_file = files.template_file
        self.context_length = files.context_length
        self.embedding = files.embedding
        self.sampling_defaults = sampling_defaults(files)
        self.answer_tokens = answer_tokens(files)
        self.vocab_size = files.vocab_size
        self._tokenizer = _tokenizer(files)
        self._vocabulary = Vocabulary(self._tokenizer, files.tokenizer_json, files.directory / "tokenizer.json")
        sources = [source for source in (files.chat_template, files.tool_template) if source is not None]
        self._control = ControlTokens(self._tokenizer, "\n".join(sources), _unknown_ids(files, self._tokenizer))
        self.eos_token_ids = files.eos_token_ids | self._eos_of_tokenizer(files)
        self.max_prompt_chars = self.context_length * MAX_CHARS_PER_TOKEN
        self._plain_calling = Calling.of(files.chat_template or "", *calling)
        self.calling = Calling.of(files.tool_template, *calling) if files.tool_template is not None else self._plain_calling
        self.template = self._template(files, files.chat_template, self._plain_calling.family)
        self.tool_template = self._template(files, files.tool_template, self.calling.family) or self.template
        self._special = frozenset(self._control.texts[: self._control.num_special])
        self._renderer = LocalRenderer()

    @classmethod
    def load(
        cls,
        model_dir: Path | str,
        name: str = "",
        calling: tuple[str, str] = ("auto", "auto"),
        template_file: Path | None = None,
        *,
        defaults: bool = True,
    ) -> TextModel:
        """Reads a directory in the Hugging Face layout, or a GGUF file.

        `name` defaults to `model_name` of it. `calling` are the settings of `Calling.of`. A chat
        template in `template_file` replaces the model's own. `defaults`: it has its own values of
        parameters that requests leave out.

        Raises FAILED_PRECONDITION with reason MODEL_INVALID, naming the file that is wrong.
        """
        directory = model_location(Path(model_dir))
        files = ModelFiles.read(directory, template_file)
        try:
            return cls(files if defaults else replace(files, generation={}), name or model_name(Path(model_dir)), calling)
        except BaseException as error:
            if isinstance(error, RyzansteinError) or not _is_of_the_files(error):
                raise
            raise model_invalid(directory / "tokenizer.json", f"{type(error).__name__}: {error}") from None

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of any prompt. INVALID_ARGUMENT names the field.

        Tokenizing a long one takes milliseconds per 10 kB. A chat's template is run in this
        process: an agent uses `checked_chat` and `encode_rendered` instead.
        """
        match prompt:
            case ChatPrompt():
                return self._encode_chat(prompt)
            case TextPrompt(text):
                return self.encode(text)
            case TokenPrompt(token_ids):
                return self.checked_ids(token_ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Returns the tokens of a conversation as the model's template writes it.

        They end where the assistant speaks.
        """
        return self._encode_chat(ChatPrompt(tuple(messages)))

    def _encode_chat(self, prompt: ChatPrompt) -> list[int]:
        calling = self.calling_of(prompt)
        try:
            rendered = self._rendered(prompt, calling)
        except RyzansteinError:
            if not calling.native:
                raise
            rendered = self._rendered(prompt, calling.generic())
        return self.encode_rendered(rendered if rendered.shows_tools else self._rendered(prompt, calling.generic()))

    def _rendered(self, prompt: ChatPrompt, calling: Calling) -> Rendered:
        given = calling.described(prompt)
        return self._renderer.render_now(self.checked_chat(given), given)

    def calling_of(self, prompt: ChatPrompt) -> Calling:
        """Returns how functions are told and called in a conversation: without any its template may be another one."""
        return self.calling if prompt.tools.offered and prompt.tools.mode is not ToolMode.NONE else self._plain_calling

    def special_id(self, text: str) -> int | None:
        """Returns the id of the special token with this text, if there is one."""
        return self._tokenizer.token_to_id(text) if text in self._special else None

    def shows_special(self, prompt: Prompt, calling: Calling) -> bool:
        """Returns whether special tokens tell the parts of an answer apart, so that its text must have them."""
        return isinstance(prompt, ChatPrompt) and not self._special.isdisjoint(calling.markers(prompt))

    def checked_chat(self, prompt: ChatPrompt) -> TemplateSource:
        """Returns the template for these messages, before any work.

        Raises FAILED_PRECONDITION when there is no template, INVALID_ARGUMENT when the messages
        cannot fit.
        """
        template = self.tool_template if prompt.tools.offered else self.template
        if template is None:
            raise errors.failed_precondition(
                "NO_CHAT_TEMPLATE", f"model {self.name} has no chat template: use text completion instead"
            )
        if (num_messages := len(prompt.messages)) > self.context_length:
            raise errors.invalid("messages", f"must have at most {self.context_length} entries for this model", num_messages)
        self._check_chars("messages", prompt.num_chars)
        return template

    def encode_rendered(self, rendered: Rendered) -> list[int]:
        """Returns the tokens of a rendered conversation.

        No message's text becomes a control token.
        """
        return self._read("messages", self._control.encode(rendered))

    def encode(self, text: str) -> list[int]:
        """Returns a text's tokens, with the special tokens that tokenizer.json puts around it."""
        self._check_chars("text", len(text))
        return self._read("text", token_ids(self._tokenizer, text, special=True))

    def _read(self, field: str, token_ids: list[int]) -> list[int]:
        """Returns the tokens of a text.

        INVALID_ARGUMENT: the model has no row for one of them. Fine-tuning often adds tokens, and no rows.
        """
        if max(token_ids, default=0) >= self.vocab_size:
            unread = next(token_id for token_id in token_ids if token_id >= self.vocab_size)
            what = f"the tokenizer makes token {unread} of it, and the model has only those below {self.vocab_size}"
            raise errors.invalid(field, what, self.token_text(unread)[:64])
        return token_ids

    @property
    def fills_in(self) -> bool:
        """Whether the model can be asked for what stands between two texts."""
        return format_of(self._tokenizer.token_to_id) is not None

    def infill(self, prefix: str, suffix: str) -> Infill:
        """Returns a prompt that is answered with what stands between two texts.

        No part of them becomes a control token. Raises FAILED_PRECONDITION with reason NO_INFILL.
        """
        self._check_chars("prompt", len(prefix))
        self._check_chars("suffix", len(suffix))
        found = format_of(self._tokenizer.token_to_id)
        if found is None:
            text = f"model {self.name} has no tokens to fill in the middle: suffix is not supported"
            violation = FieldViolation("suffix", "the model has no tokens to fill in the middle")
            raise replace(errors.failed_precondition("NO_INFILL", text), violations=(violation,))
        filled = arranged(found, prefix, suffix, self._tokenizer.token_to_id, self._encode_plain)
        return replace(filled, token_ids=self._read("prompt", self._before_texts() + filled.token_ids))

    def _before_texts(self) -> list[int]:
        """Returns the special tokens that tokenizer.json puts before a text."""
        framed, bare = token_ids(self._tokenizer, "a", special=True), token_ids(self._tokenizer, "a")
        ends = (i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
        return framed[: next(ends, 0)]

    def _encode_plain(self, text: str, bare: bool) -> list[int]:
        """Returns a text's tokens, of which none is a control token. `bare`: without a space before it."""
        if not bare:
            return self._control.encode_text(text)
        mark = self._control.encode_text(_MARK)
        marked = self._control.encode_text(_MARK + text)
        return marked[len(mark) :] if marked[: len(mark)] == mark else self._control.encode_text(text)

    def encode_bare(self, text: str) -> list[int]:
        """Returns a text's tokens, without special tokens around it."""
        self._check_chars("text", len(text))
        return token_ids(self._tokenizer, text)

    def spelled(self, token_ids: Sequence[int]) -> str:
        """Returns the whole text of tokens, special ones by name."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the whole text of tokens, without special ones."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Returns the text of a single token, special ones included.

        The text is U+FFFD where the token is only a part of a character.
        """
        return self._vocabulary.text(token_id)

    def vocabulary(self, *, with_special: bool = False) -> Vocabulary:
        """Returns what tokens stand for in a text; special ones for their names or for nothing."""
        return self._vocabulary.spelled if with_special else self._vocabulary

    def text_bytes(self, token_id: int, *, first: bool) -> bytes:
        """Returns what the token adds to a text; `first`: it is the first in the text.

        That is a part of a character for some tokens, and nothing for special ones.
        """
        return self._vocabulary.text_bytes(token_id, first=first)

    def all_text_bytes(self) -> list[bytes]:
        """Returns for each token what `text_bytes` does when it is not the first."""
        return self._vocabulary.all_bytes(self.vocab_size)

    def is_skipped(self, token_id: int) -> bool:
        """Returns whether it adds nothing to a text: special tokens, padding of the vocabulary."""
        return self._vocabulary.is_skipped(token_id)

    def is_control(self, token_id: int) -> bool:
        """Returns whether only templates may write it, see `ControlTokens`."""
        return self._control.has(token_id)

    def detokenizer(self) -> Detokenizer:
        """Returns a new detokenizer for one choice."""
        return self._vocabulary.detokenizer()

    def bad_sequences(self, words: Sequence[str]) -> list[list[int]]:
        """Returns the tokens of each word, at the beginning of a text and, where it differs, after a space."""
        found: list[list[int]] = []
        for word in words:
            begin, after_space = (token_ids(self._tokenizer, prefix + word.lstrip(" ")) for prefix in ("", " "))
            found += [begin] if begin else []
            # Where the space is a token of its own, the word's other tokens are those at the beginning.
            if len(after_space) == len(begin) and after_space[:1] != begin[:1]:
                found.append(after_space)
        return found

    def _check_chars(self, field: str, num_chars: int) -> None:
        """Checks the length before any work: a text that cannot fit must not occupy the node."""
        if num_chars > self.max_prompt_chars:
            raise errors.invalid(field, f"must have at most {self.max_prompt_chars} characters for this model", num_chars)

    def checked_ids(self, token_ids: Sequence[int], *, any_length: bool = False) -> list[int]:
        """Returns the ids. Raises CONTEXT_TOO_LONG, or INVALID_ARGUMENT for one outside the vocabulary.

        `any_length`: they will be cut.
        """
        if len(token_ids) >= self.context_length and not any_length:
            raise errors.context_too_long(len(token_ids), 1, self.context_length)
        wrong = next((token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size), None)
        if wrong is not None:
            raise errors.invalid("token_ids", f"each must be in [0, {self.vocab_size})", wrong)
        return list(token_ids)

    def _template(self, files: ModelFiles, source: str | None, calls: str) -> TemplateSource | None:
        """Returns the chat template. MODEL_INVALID: it is not a template.

        Other defects show only when it is run.
        """
        if source is None:
            return None
        where = files.template_file or files.directory
        if len(source) > MAX_TEMPLATE_CHARS:
            raise model_invalid(where, f"chat template has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}")
        try:
            parse(source)
        except TemplateSyntaxError as error:
            raise model_invalid(where, f"chat template: line {error.lineno}: {error}") from error
        except RecursionError:
            raise model_invalid(where, "chat template: nested too deeply") from None
        control, max_chars = self._control, _TEMPLATE_OVERHEAD * self.max_prompt_chars + MAX_TEMPLATE_CHARS
        return TemplateSource(source, dict(files.special_tokens), control.texts, control.num_special, max_chars, calls)

    def _eos_of_tokenizer(self, files: ModelFiles) -> frozenset[int]:
        content = files.special_tokens.get("eos_token")
        token_id = None if content is None else self._tokenizer.token_to_id(content)
        return frozenset() if token_id is None or token_id >= self.vocab_size else frozenset([token_id])


def _is_of_the_files(error: BaseException) -> bool:
    """Returns whether an error comes from the model's files.

    Any error while these files are read is about them. A panic of tokenizers is not an Exception in
    Python.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _tokenizer(files: ModelFiles) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(files.tokenizer_json)
    except Exception as error:  # tokenizers raises plain Exception
        raise model_invalid(files.directory / "tokenizer.json", str(error)) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    _set_flags(tokenizer, files.added_tokens)
    # Adds those that only tokenizer_config.json calls special. A token beyond the vocabulary would
    # be one that the model cannot read.
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    special = {*files.special_tokens.values(), *files.extra_special_tokens} - added
    tokenizer.add_special_tokens(sorted(content for content in special if tokenizer.token_to_id(content) is not None))
    return tokenizer


def _set_flags(tokenizer: Tokenizer, tokens: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
    """Gives added tokens the flags that tokenizer_config.json has for them, as transformers does."""
    known = tokenizer.get_added_tokens_decoder()
    for token_id, entry in sorted(tokens, key=itemgetter(0)):
        content, flags = entry["content"], {flag: entry[flag] for flag in FLAGS}
        before = known.get(token_id)
        same = before is not None and all(getattr(before, flag) == value for flag, value in flags.items())
        if content and tokenizer.token_to_id(content) == token_id and not same:
            add = tokenizer.add_special_tokens if flags["special"] else tokenizer.add_tokens
            add([AddedToken(content, **flags)])


def _unknown_ids(files: ModelFiles, tokenizer: Tokenizer) -> list[int]:
    """Returns the ids that stand for a character that the vocabulary lacks.

    They are not control tokens, whatever they are called.
    """
    model = json.loads(files.tokenizer_json)["model"]
    names = (model.get("unk_token"), files.special_tokens.get("unk_token"))
    known = [tokenizer.token_to_id(name) for name in names if isinstance(name, str)]
    return [each for each in (*known, model.get("unk_id")) if each is not None]
