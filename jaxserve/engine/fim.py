"""Prompts that ask for the text between two others (fill in the middle), in the form that a model was trained on.

A form consists of marker tokens around the text before the gap and the text after it. Which form a model has, its
vocabulary tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.core.errors import RequestError, UnsupportedParameter
from jaxserve.engine.tokenizer import Tokenizer

# The text after the gap takes at most this part of a truncated prompt, unless the text before it is short.
SUFFIX_PART = 4


@dataclass(frozen=True)
class FimForm:
    """The markers of a form, as tokens: before the prefix, before the suffix and before the answer.

    `suffix_first`: the suffix and its marker come before the prefix, and the answer continues the prefix without a
    marker. `ends`: further tokens with which such models end an answer.
    """

    prefix: str
    suffix: str
    middle: str | None
    ends: tuple[str, ...] = ()
    suffix_first: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """The tokens that a vocabulary must have."""
        return (self.prefix, self.suffix) if self.middle is None else (self.prefix, self.suffix, self.middle)


FORMS = (
    # Code Llama
    FimForm("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    # Qwen2.5-Coder, Qwen3-Coder, CodeGemma
    FimForm(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>", "<|im_end|>"),
    ),
    # DeepSeek-Coder
    FimForm("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<|EOT|>",)),
    # StarCoder, Granite, Stable Code, CodeQwen1.5
    FimForm(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<fim_pad>", "<file_sep>", "<repo_name>", "<reponame>", "<|endoftext|>"),
    ),
    # Codestral
    FimForm("[PREFIX]", "[SUFFIX]", None, suffix_first=True),
)


@dataclass(frozen=True)
class FimPrompt:
    """The prompt for a gap, and where in it the text before the gap is."""

    token_ids: tuple[int, ...]
    prefix: slice


class FillInMiddle:
    """The form in which a model fills gaps."""

    def __init__(self, tokenizer: Tokenizer):
        """Raise UnsupportedParameter, naming the tokens that are missing, if the vocabulary has no known form."""
        self._tokenizer = tokenizer
        form = next((form for form in FORMS if None not in map(tokenizer.token_id, form.markers)), None)
        if form is None:
            known = ", or ".join(" ".join(form.markers) for form in FORMS)
            raise UnsupportedParameter(
                "suffix is not supported by this model: its vocabulary lacks the tokens that mark what to fill in, "
                f"{known}",
                field="suffix",
            )
        self._suffix_first = form.suffix_first
        self._front, self._gap, self._middle = (self._ids(marker) for marker in (form.prefix, form.suffix, form.middle))
        self.end_token_ids = self._ids(*form.markers, *form.ends)  # besides the model's own end tokens

    def prompt(
        self,
        prefix: str | Sequence[int],
        suffix: str | Sequence[int],
        *,
        add_special_tokens: bool = True,
        keep: int | None = None,
    ) -> FimPrompt:
        """Return the prompt for the gap between a prefix and a suffix, each a text or token ids.

        `keep`: the most tokens that the prompt may have. What is nearest to the gap is kept: the last tokens of the
        prefix and the first of the suffix. Raise RequestError if none fits between the markers, or a text is not valid
        Unicode.
        """
        before, after = self._encode_prefix(prefix, keep), self.encode_suffix(suffix, keep)
        start = self._tokenizer.bos_ids if add_special_tokens else ()
        if before and before[0] == self._tokenizer.bos_token_id:
            start, before = before[:1], before[1:]  # stays the first token
        if keep is not None:
            markers = len(start) + len(self._front) + len(self._gap) + len(self._middle)
            before, after = _nearest(before, after, keep, keep - markers)
        head: tuple[int, ...] = (*start, *self._front)
        tail: tuple[int, ...] = (*self._gap, *after, *self._middle)
        if self._suffix_first:
            head, tail = (*start, *self._gap, *after, *self._front), ()
        return FimPrompt((*head, *before, *tail), slice(len(head), len(head) + len(before)))

    def encode_suffix(self, suffix: str | Sequence[int], keep: int | None = None) -> tuple[int, ...]:
        """Return the token ids of a suffix, at least its first `keep`, to give to `prompt` with several prefixes."""
        if not isinstance(suffix, str):
            return tuple(suffix)
        end = None if keep is None else self._characters(keep)
        return tuple(self._tokenizer.encode_inside(suffix[:end]))

    def _encode_prefix(self, prefix: str | Sequence[int], keep: int | None) -> tuple[int, ...]:
        if not isinstance(prefix, str):
            return tuple(prefix)
        start = 0 if keep is None else -self._characters(keep)
        return tuple(self._tokenizer.encode(prefix[start:], add_special_tokens=False))

    def _characters(self, keep: int) -> int:
        """Return how many characters of a text to tokenize of which `keep` tokens may be wanted."""
        return self._tokenizer.max_characters(2 * keep + 1)

    def _ids(self, *tokens: str | None) -> tuple[int, ...]:
        """Return the ids of those tokens that the vocabulary has."""
        ids = (None if token is None else self._tokenizer.token_id(token) for token in tokens)
        return tuple(id for id in ids if id is not None)


def _nearest(
    before: tuple[int, ...], after: tuple[int, ...], keep: int, room: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the last tokens before a gap and the first after it, `room` tokens together."""
    if room < 1:
        raise RequestError(
            f"truncate_prompt_tokens is {keep}: with suffix it must be at least {keep - room + 1}, so that a token of "
            "the text fits beside those that mark its parts",
            field="truncate_prompt_tokens",
            value=keep,
            limit=keep - room + 1,
        )
    after = after[: max(room // SUFFIX_PART, room - len(before))]
    return before[max(0, len(before) - room + len(after)) :], after
