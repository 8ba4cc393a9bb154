"""The page about the API names every field that the API knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from polypath.deployments.schema import Body
from polypath.deployments.schema_chat import ChatBody
from polypath.deployments.schema_completion import CompletionBody

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.mark.parametrize("body_type", [ChatBody, CompletionBody])
def test_every_field_is_documented(body_type: type[Body]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    fields = [*body_type.model_fields, *body_type.refused]
    assert [name for name in fields if f"`{name}`" not in text] == []


@pytest.mark.parametrize("body_type", [ChatBody, CompletionBody])
def test_no_field_is_both_honoured_and_refused(body_type: type[Body]) -> None:
    assert not set(body_type.model_fields) & set(body_type.refused)
