"""Tokenizer and chat templates of a Hugging Face folder: tokenizer.json, tokenizer_config.json,
*.jinja.

tokenizer.json is taken as it stands (what it adds in front of a text too: as in transformers,
`add_bos_token` beside it counts
for nothing). transformers 5.24 rebuilds it for a few classes
(`LlamaTokenizer` over a SentencePiece
vocabulary splits blanks after control words differently); where the two differ, the file wins here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from ..tokenizer import Tokenizer
from .json_file import read_json

if TYPE_CHECKING:
    import tokenizers

TOKENIZER, SETTINGS, SPECIALS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = ("additional_special_tokens", "extra_special_tokens")


def folder_tokenizer(folder: Path, eos_ids: tuple[int, ...], vocab_size: int) -> Tokenizer:
    """The folder's tokenizer. Raises ModelError when there is none that we can read, or it is
    another model's.
    """
    backend = _read_backend(folder)
    settings = read_settings(folder)
    roles = special_tokens(settings)
    _add_missing(backend, settings, roles)
    tokenizer = Tokenizer(backend, special_tokens=roles, eos_ids=eos_ids)
    if tokenizer.vocab_size > vocab_size:
        raise ModelError(
            f"{folder / TOKENIZER} has ids up to {tokenizer.vocab_size - 1}, but the model has "
            f"{vocab_size} embeddings:"
            " it belongs to another model."
        )
    return tokenizer


def folder_templates(folder: Path) -> tuple[dict[str, str], str]:
    """(chat templates by name, where they come from). As in transformers, files win over
    tokenizer_config.json.
    """
    named: dict[str, str] = {}
    if (folder / TEMPLATE).is_file():
        named["default"] = _read_text(folder / TEMPLATE)
    for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja")):
        named[file.stem] = _read_text(file)
    others = settings_templates(read_settings(folder).get("chat_template"), folder / SETTINGS)
    if not named:
        return others, SETTINGS
    source = TEMPLATE if "default" in named else MORE_TEMPLATES
    if others and others != named:
        source += f" (another one, in {SETTINGS}, is not used)"
    return named, source


def settings_templates(value: Any, where: Path) -> dict[str, str]:
    """`chat_template` of a tokenizer_config.json: a string, or a list of named ones (any JSON
    value may stand there).
    """
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        value = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
    if isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(text, str) for name, text in value.items()
    ):
        return value
    raise ModelError(f"{where}: chat_template must be a string or a list of name and template.")


def read_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json; empty when there is neither."""
    settings: dict[str, Any] = {}
    for name in (SPECIALS, SETTINGS):
        if (folder / name).is_file():
            settings |= {key: value for key, value in read_json(folder / name).items()}
    return settings


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts by role; a token is spelled as a string or as an object with `content`."""
    texts = {role: token_text(settings.get(role)) for role in ROLES}
    return {role: text for role, text in texts.items() if text is not None}


def token_text(value: Any) -> str | None:
    """The text of a token in its JSON spelling."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def eos_token_id(folder: Path) -> int | None:
    """Id of the tokenizer's own end token, without building the tokenizer."""
    settings = read_settings(folder)
    text = token_text(settings.get("eos_token"))
    if text is None or not (folder / TOKENIZER).is_file():
        return None
    decoder = settings.get("added_tokens_decoder")
    for token_id, entry in (decoder if isinstance(decoder, dict) else {}).items():
        if token_text(entry) == text and token_id.isdecimal():
            return int(token_id)
    content = read_json(folder / TOKENIZER)
    added, model = content.get("added_tokens"), content.get("model")
    for entry in added if isinstance(added, list) else []:
        if token_text(entry) == text and isinstance(entry.get("id"), int):
            return entry["id"]
    vocab = model.get("vocab") if isinstance(model, dict) else None
    found = vocab.get(text) if isinstance(vocab, dict) else None
    return found if isinstance(found, int) else None


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    path = folder / TOKENIZER
    if not path.is_file():
        raise ModelError(
            f"{folder} has no {TOKENIZER}; save the tokenizer with transformers' save_pretrained "
            "to get one (other"
            " vocabulary files are not read)."
        )
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception for every kind of broken file
        raise ModelError(f"{path} cannot be read: {error}.") from None


def _add_missing(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], roles: Mapping[str, str]
) -> None:
    """Tokens that only tokenizer_config.json names, as transformers adds them."""
    from tokenizers import AddedToken

    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    decoder = settings.get("added_tokens_decoder")
    entries = sorted(decoder.items(), key=lambda each: int(each[0])) if decoder else []
    for _, entry in entries:
        text = token_text(entry)
        if text is None or text in present:
            continue
        flags = {
            k: bool(entry[k])
            for k in ("lstrip", "rstrip", "single_word", "normalized", "special")
            if k in entry
        }
        backend.add_tokens([AddedToken(text, **flags)])
    extra = [token_text(each) for key in EXTRA for each in _values(settings.get(key))]
    texts = [text for text in (*roles.values(), *extra) if text is not None and text not in present]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])


def _values(extra: Any) -> list[Any]:
    """additional_special_tokens is a list, extra_special_tokens a list or an object."""
    if isinstance(extra, Mapping):
        return list(extra.values())
    return extra if isinstance(extra, list) else []


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}.") from None
