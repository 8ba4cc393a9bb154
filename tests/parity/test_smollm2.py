"""Greedy text of the default model against transformers on the same dequantized float32 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from polypath.runtime.checkpoint.source import Checkpoint, open_checkpoint
from polypath.tests.driving import (
    NEAR_TIE,
    Answer,
    assert_same_greedy,
    build_yardstick,
    request,
    run,
)
from polypath.tests.parity.reference import reference_greedy, reference_logits

NUM_NEW = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "Water boils at",
    "In 1969, the first",
    "A list of fruits: apple, banana,",
    "The opposite of hot is",
    "To make a good cup of tea, you",
    "E = mc^2 means that",
    "Roses are red,\nViolets are blue,\n",
    "SELECT name FROM users WHERE",
    "The mitochondria is",
    "Dear Sir or Madam,\n\n",
    "1 2 3 4 5 6 7",
    "Der Hund ist",
    "The quick brown fox",
    "My favourite book is",
    "Question: What is the largest planet?\nAnswer:",
    "import numpy as np\n\ndef mean(x):\n",
)
GENERATED = PROMPTS[::5]


def _reference(checkpoint: Checkpoint) -> Any:  # a transformers model
    import transformers

    c = checkpoint.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=c.tie_word_embeddings,
    )
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    state = {name: checkpoint.read(name).float() for name in sorted(checkpoint.tensor_names())}
    if c.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    rotary = type(model.model.rotary_emb)(config=config)
    model.model.rotary_emb = rotary  # its frequencies are no weights, so `assign` left them meta
    return model.eval()


@pytest.fixture(scope="module")
def answers(default_model_path: Path) -> dict[str, Answer]:
    """What we say, all prompts in one batch."""
    engine = build_yardstick(default_model_path, pages=400, max_model_len=512)
    requests = [
        request(
            text,
            engine.tokenizer.encode(text),
            max_tokens=NUM_NEW,
            ignore_eos=True,
            logprobs=2,
        )
        for text in PROMPTS
    ]
    return run(engine, requests)


@pytest.fixture(scope="module")
def checkpoint(default_model_path: Path) -> Checkpoint:
    """The default model's file."""
    return open_checkpoint(str(default_model_path))


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Any:  # a transformers model
    """transformers' Llama with the file's weights."""
    return _reference(checkpoint)


def test_every_token_is_what_transformers_would_say_next_or_a_near_tie(
    checkpoint: Checkpoint, model: Any, answers: dict[str, Answer]
) -> None:
    tokenizer, equal = checkpoint.tokenizer(), 0
    for text in PROMPTS:
        prompt, said = tokenizer.encode(text), answers[text].token_ids
        logits = reference_logits(model, [*prompt, *said])[len(prompt) - 1 : -1]
        different = (logits.argmax(dim=-1) != torch.tensor(said)).nonzero().flatten().tolist()
        equal += not different
        for i in different[:1]:
            gap = float(logits[i].max() - logits[i, said[i]])
            print(f"{text!r}: first difference at token {i}, gap {gap:.2e}")
            assert gap < NEAR_TIE
    print(f"{equal} of {len(PROMPTS)} texts are equal")
    assert all(len(answer.token_ids) == NUM_NEW for answer in answers.values())


@pytest.mark.slow
def test_greedy_text_equals_what_transformers_generates_or_differs_at_a_near_tie(
    checkpoint: Checkpoint, model: Any, answers: dict[str, Answer]
) -> None:
    """Of some prompts: what the test above saw of every token says the same, but for the path that
    `generate` takes.
    """
    tokenizer, equal = checkpoint.tokenizer(), 0
    for text in GENERATED:
        expected = reference_greedy(model, tokenizer.encode(text), NUM_NEW)
        equal += expected == answers[text].token_ids
        assert_same_greedy(expected, answers[text])
    print(f"{equal} of {len(GENERATED)} texts are equal")
