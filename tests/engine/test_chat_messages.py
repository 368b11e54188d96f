"""Messages that are malformed are refused with the field named, before the chat template sees them."""

import pytest

from jaxserve.core.errors import RequestError
from jaxserve.engine.chat_template import BUILTIN_TEMPLATES, ChatTemplate

TEMPLATES = [ChatTemplate(source) for source in BUILTIN_TEMPLATES.values()]
GOOD = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": None}, "content"),
        ({"role": "user"}, "content"),
        ({"role": "system", "content": None}, "content"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "user", "content": {"text": "hi"}}, "content"),
        ({"role": "assistant", "content": 1.5}, "content"),
        ({"role": "user", "content": ["hi"]}, "content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content"),
        ({"content": "hi"}, "role"),
        ({"role": None, "content": "hi"}, "role"),
        ({"role": 5, "content": "hi"}, "role"),
        ({"role": "", "content": "hi"}, "role"),
        ({}, "role"),
        ("hi", ""),
        (None, ""),
    ],
)
def test_field_of_a_malformed_message_is_named(message, field) -> None:
    place = f"messages.1.{field}".rstrip(".")
    for template in TEMPLATES:
        with pytest.raises(RequestError) as refused:
            template.render([GOOD, message])
        assert refused.value.field == place
        assert "must be" in str(refused.value)
        assert "template" not in str(refused.value)


@pytest.mark.parametrize("messages", [None, 5, "hi", b"hi", GOOD, []])
def test_what_is_no_list_of_messages_is_refused(messages) -> None:
    with pytest.raises(RequestError, match=r"^messages is .*: it must be a list of messages") as refused:
        TEMPLATES[0].render(messages)
    assert refused.value.field == "messages"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"role": "assistant", "content": None}, ""),
        ({"role": "assistant"}, ""),
        ({"role": "assistant", "content": None, "refusal": "no"}, "no"),
        ({"role": "user", "content": ({"type": "text", "text": "a"}, {"type": "text", "text": "b"})}, "a\nb"),
        ({"role": "user", "content": ""}, ""),
    ],
)
def test_content_that_may_be_missing_is_empty_text(message, shown) -> None:
    prompt = TEMPLATES[0].render(iter([GOOD, message]), add_generation_prompt=False)
    assert prompt == f"User: hi\n{message['role'].capitalize()}: {shown}\n"
