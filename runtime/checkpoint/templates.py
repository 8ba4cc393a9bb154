"""Which chat template is used: the user's own first, then the model's; said once when there is
none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..chat_template import ChatTemplate


def choose_template(
    override: str | None, own: Mapping[str, str], source: str, special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The template to use, or None. Raises ModelError when it is unreadable or does not compile."""
    from ..chat_template import DEFAULT, ChatTemplate, open_override

    if override is not None:
        text, source = open_override(override)
        return ChatTemplate({DEFAULT: text}, special_tokens, source=source)
    if not own:
        return None
    return ChatTemplate(own, special_tokens, source=source)


def check_override(override: str) -> None:
    """Raise ModelError when a template that the user gave is unreadable or does not compile."""
    choose_template(override, {}, "", {})


def no_template_fact(name: str) -> str:
    """What a user of a model without a template must know."""
    return (
        f"chat template: {name} has none, so chats are refused; /v1/completions works, and "
        "--chat-template gives one"
    )
