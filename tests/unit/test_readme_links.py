"""The README's map: its links lead somewhere, and its file tree is the tree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("kernels", "runtime", "actors", "deployments")
README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    """The text under a heading of the second level."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", README, re.M | re.S)
    assert found is not None, f"README has no section {title!r}"
    return found.group(1)


def tree_entries() -> set[str]:
    """Paths of the file tree: two spaces are one folder deeper, folders end in a slash."""
    block = re.search(r"```text\n(.*?)```", section("File tree"), re.S)
    assert block is not None, "the file tree is no ```text block"
    folders: list[str] = []
    entries: set[str] = set()
    for line in filter(str.strip, block.group(1).splitlines()):
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        entries.add("/".join([*folders, name.rstrip("/")]))
        if name.endswith("/"):
            folders.append(name.rstrip("/"))
    return entries


def test_every_link_to_a_file_leads_to_one() -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", README)
    assert targets
    assert not [target for target in targets if not (ROOT / target).exists()]


def test_one_request_is_eight_links() -> None:
    steps = re.findall(r"^(\d)\. .*\]\(", section("One request in eight links"), re.M)
    assert steps == list("12345678")


def test_the_tree_names_every_product_file() -> None:
    found = {path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}
    assert not {path.relative_to(ROOT).as_posix() for path in found} - tree_entries()


def test_the_tree_names_no_file_that_is_gone() -> None:
    assert not [name for name in tree_entries() if not any(ROOT.glob(name))]
