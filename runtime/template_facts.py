"""What a chat template does, read from its syntax tree: does it know tools, does it iterate over
content parts?
"""

from __future__ import annotations

from dataclasses import dataclass

import jinja2.meta
from jinja2 import nodes

from .template_sandbox import ChatEnvironment


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateFacts:
    """`wants_parts`: content is read as a list of parts only. `literals`: all text that the
    template itself writes.
    """

    supports_tools: bool  # lists the tools it is given
    supports_tool_calls: bool  # shows tool calls of earlier turns
    wants_parts: bool
    literals: str


def read_facts(text: str) -> TemplateFacts:
    """Facts of a template that compiles."""
    tree = ChatEnvironment().parse(text)
    written = {node.data for node in tree.find_all(nodes.TemplateData)}
    constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    return TemplateFacts(
        supports_tools="tools" in jinja2.meta.find_undeclared_variables(tree),
        supports_tool_calls="tool_calls" in constants | attributes,
        wants_parts=_iterates_over_content(tree) and not _tests_for_string(tree),
        literals="\0".join(written | constants),
    )


def _iterates_over_content(tree: nodes.Template) -> bool:
    """Whether a loop runs over `message['content']`, directly or through a variable set to it."""
    aliases = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, frozenset())
    }
    loops = tree.find_all(nodes.For)
    return any(_is_content(loop.iter, frozenset(aliases)) for loop in loops)


def _is_content(node: nodes.Node, aliases: frozenset[str]) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Name):
        return node.name in aliases
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, aliases)
    return False


def _tests_for_string(tree: nodes.Template) -> bool:
    """A template that asks `is string` takes strings too; they are what clients send."""
    return any(
        node.name in ("string", "iterable", "sequence") for node in tree.find_all(nodes.Test)
    )
