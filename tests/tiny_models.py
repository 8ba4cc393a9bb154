"""Tiny model folders for tests: one that says exactly what it is told to, random ones of each
family, and their GGUF
twins.

The tokenizer is byte-level without merges: ids 0 `<s>`, 1 `</s>`, 2 `<eot>`, 3 `<alt>`, then byte b
is id 4 + b, then
`words` (which only the model can say, no text encodes to them).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from polypath.tests import k_quantizers

BS = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2's table leaves alone
BYTE = {b: chr(b) for b in BS} | {
    b: chr(256 + n) for n, b in enumerate(x for x in range(256) if x not in BS)
}
SPECIALS = ["<s>", "</s>", "<eot>", "<alt>"]  # ids 0, 1, 2, 3; bytes follow
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + '=' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
)
HEAD_DIM, INNER = 64, 64
SCRIPT_HIDDEN = 320


def spell(text: str) -> str:
    """Text in GPT-2's byte alphabet."""
    return "".join(BYTE[b] for b in text.encode())


def vocabulary(words: Sequence[str] = ()) -> dict[str, int]:
    """Token to id."""
    tokens = [*SPECIALS, *(BYTE[b] for b in range(256)), *map(spell, words)]
    return {token: i for i, token in enumerate(tokens)}


def write_tokenizer(
    folder: Path, words: Sequence[str] = (), *, template: str | None = CHAT_TEMPLATE
) -> dict[str, int]:
    """tokenizer.json and tokenizer_config.json; returns the vocabulary."""
    vocab = vocabulary(words)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return vocab


def write_folder(
    path: Path,
    words: Sequence[str] = (),
    *,
    rows: int = 0,
    hidden: int = SCRIPT_HIDDEN,
    layers: int = 1,
    config: dict[str, Any] | None = None,
    template: str | None = CHAT_TEMPLATE,
) -> dict[str, int]:
    """A Llama folder without weights.

    `rows` are embedding rows beyond the vocabulary; `config` overrides config.json.
    """
    path.mkdir(parents=True, exist_ok=True)
    vocab = write_tokenizer(path, words, template=template)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "vocab_size": len(vocab) + rows,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
        "hidden_act": "silu",
    }
    (path / "config.json").write_text(json.dumps(settings | (config or {}), indent=1))
    return vocab


def _weights(
    hidden: int, rows: int, layers: int, fill: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (HEAD_DIM, hidden),
        "self_attn.v_proj": (HEAD_DIM, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (INNER, hidden),
        "mlp.up_proj": (INNER, hidden),
        "mlp.down_proj": (hidden, INNER),
    }
    weights = {
        "model.embed_tokens.weight": fill(rows, hidden),
        "lm_head.weight": fill(rows, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for i in range(layers):
        weights |= {f"model.layers.{i}.{k}.weight": fill(*s) for k, s in shapes.items()}
        for norm in ("input", "post_attention"):
            weights[f"model.layers.{i}.{norm}_layernorm.weight"] = torch.ones(hidden)
    return weights


def script(
    path: Path | str,
    says: Sequence[int | str],
    words: Sequence[str] = (),
    *,
    rows: int = 0,
    gain: float = 1.0,
    config: dict[str, Any] | None = None,
    template: str | None = CHAT_TEMPLATE,
) -> tuple[list[int], int]:
    """A model that says `says` after a ":" and goes round for ever (unless it ends with an end
    token).

    Attention and MLP are zero, so the next token depends on the last one alone; no id may come
    twice in `says`. Items
    are ids or strings; the bytes of a string that is no word are spoken one by one. Returns the ids
    said and the number
    of tokens in the vocabulary.
    """
    folder = Path(path)
    vocab = write_folder(folder, words, rows=rows, config=config, template=template)
    num_rows = len(vocab) + rows
    ids: list[int] = []
    for item in says:
        if isinstance(item, int):
            ids.append(item)
        elif item in SPECIALS or item in words:
            ids.append(vocab[item if item in SPECIALS else spell(item)])
        else:
            ids.extend(vocab[BYTE[b]] for b in item.encode())
    assert len(set(ids)) == len(ids), (
        "a token follows from the last one alone, so none may come twice"
    )
    weights = _weights(SCRIPT_HIDDEN, num_rows, 1, torch.zeros)
    width = min(num_rows, SCRIPT_HIDDEN)
    weights["model.embed_tokens.weight"][:width, :width] = torch.eye(width)
    for before, after in zip([vocab[":"], *ids], [*ids, ids[0]], strict=True):
        weights["lm_head.weight"][after, before] = gain
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return ids, len(vocab)


def random(
    path: Path | str,
    seed: int = 0,
    *,
    layers: int = 2,
    hidden: int = 128,
    dtype: torch.dtype = torch.float32,
    config: dict[str, Any] | None = None,
    words: Sequence[str] = (),
    rows: int = 0,
    template: str | None = CHAT_TEMPLATE,
) -> None:
    """A Llama with ordinary random weights, for parity with transformers and cache tests."""
    folder = Path(path)
    vocab = write_folder(
        folder, words, rows=rows, hidden=hidden, layers=layers, config=config, template=template
    )
    generator = torch.Generator().manual_seed(seed)

    def fill(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    weights = _weights(hidden, len(vocab) + rows, layers, fill)
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


FAMILY_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}


def family(
    path: Path | str,
    name: str,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **config: Any,
) -> None:
    """A random model of one family, made and saved by transformers itself; `config` goes to its
    config class.

    Sizes: 2 layers, hidden 128, 4 heads of 32, 2 key/value heads, 512 positions. Norms and biases
    are random too, so
    that a forgotten one shows.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    vocab = write_tokenizer(folder)
    settings: dict[str, Any] = {
        "vocab_size": len(vocab),
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    if name == "mistral":
        settings["sliding_window"] = None
    config_class, model_class = (getattr(transformers, each) for each in FAMILY_CLASSES[name])
    model = model_class(config_class(**(settings | config)))
    _randomize(model, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)


def _randomize(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(parameter + 0.2 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


TypeOf = Callable[[str, tuple[int, ...]], str]
"""GGUF type of a matrix by its Hugging Face name and shape."""


def q4_k_m(name: str, shape: tuple[int, ...]) -> str:
    """As llama.cpp's Q4_K_M: v and output layer in Q6_K, Q5_0 where rows are no whole blocks."""
    if shape[-1] % 256:
        return "Q5_0"
    return "Q6_K" if ".v_proj." in name or name == "lm_head.weight" else "Q4_K"


def to_gguf(
    folder: Path | str,
    target: Path | str,
    type_name: str | TypeOf = "F32",
    *,
    metadata: dict[str, Any] | None = None,
    drop: Sequence[str] = (),
    pre: str | None = "gpt-2",
) -> None:
    """Writes a folder made here as a GGUF, as llama.cpp's converter would: matrices in `type_name`
    (or in what that says of a name and shape), vectors in F32.

    `metadata` adds or replaces keys (bool, int, float, str, or a list of them); `drop` leaves keys
    out; `pre` is the
    pre-tokenizer's name, None for none.
    """
    import gguf

    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    arch = "llama" if config["model_type"] == "mistral" else str(config["model_type"])
    writer = gguf.GGUFWriter(str(target), arch)
    keys = _gguf_model_keys(arch, config) | _gguf_text_keys(folder, pre) | (metadata or {})
    for key, value in keys.items():
        if key not in drop and value is not None:
            _add_key(writer, key, value)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(config, rope))
    for name, tensor in _read_weights(folder).items():
        array = _gguf_layout(arch, name, tensor.float(), config).numpy()
        wanted = type_name if isinstance(type_name, str) else type_name(name, array.shape)
        kind = gguf.GGMLQuantizationType["F32" if array.ndim == 1 else wanted]
        array = np.ascontiguousarray(array)
        if kind.name in k_quantizers.SIZES:
            stored = k_quantizers.quantize(array, kind.name)
        else:
            stored = gguf.quants.quantize(array, kind)
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(str(file))
    return weights


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[inner]}.{kind}"


def _gguf_layout(
    arch: str, name: str, tensor: torch.Tensor, config: dict[str, Any]
) -> torch.Tensor:
    """The converter's permutation of query and key rows, which arch llama alone has."""
    if arch != "llama" or not (".q_proj." in name or ".k_proj." in name):
        return tensor
    heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
    rest = tensor.shape[1:]
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *rest)
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()


def _llama3_factors(config: dict[str, Any], rope: dict[str, Any]) -> np.ndarray:
    """Base frequencies over those that transformers computes, as llama.cpp's converter stores
    them.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**settings))
    theta = rope.get("rope_theta") or config["rope_theta"]
    plain = theta ** -(torch.arange(0, config["head_dim"], 2) / config["head_dim"])
    return (plain / scaled).float().numpy()


def _gguf_model_keys(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    is_linear = rope.get("rope_type") == "linear"
    return {
        f"{arch}.rope.scaling.type": "linear" if is_linear else None,
        f"{arch}.rope.scaling.factor": float(rope["factor"]) if is_linear else None,
        "general.name": "tiny",
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.value_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(config.get("rope_theta") or rope.get("rope_theta", 1e4)),
        f"{arch}.rope.dimension_count": config["head_dim"],
        f"{arch}.vocab_size": config["vocab_size"],
        f"{arch}.attention.sliding_window": config.get("sliding_window"),
    }


def _gguf_text_keys(folder: Path, pre: str | None) -> dict[str, Any]:
    """Tokens with their types (3 control, 1 normal), merges, and the chat template of
    tokenizer_config.json."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
        "tokenizer.ggml.add_bos_token": False,
    }
    if settings.get("chat_template"):
        keys["tokenizer.chat_template"] = settings["chat_template"]
    return keys


def _add_key(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
