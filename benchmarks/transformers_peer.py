"""Peer for `polypath bench engine --vs transformers`: `generate` on the same dequantized weights.

Runs under the project's own Python, which has transformers in its `dev` extra. Protocol: peer.py.
"""

from __future__ import annotations

import time

import torch
import transformers
from peer import Run, Workload, answer, read_task
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria

from polypath.runtime.checkpoint.source import Checkpoint, open_checkpoint


class FirstTokenClock(StoppingCriteria):
    """Notes when the first token of the batch has been drawn; stops nothing."""

    def __init__(self) -> None:
        self.first_s: float | None = None

    def __call__(
        self, input_ids: torch.Tensor, scores: object, **kwargs: object
    ) -> torch.BoolTensor:
        """Called by transformers after every token."""
        self.first_s = self.first_s or time.perf_counter()
        return torch.BoolTensor([False] * input_ids.shape[0])


def load(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """The same weights in transformers' own model."""
    c = checkpoint.config
    if c.family != "llama":
        raise SystemExit(f"the transformers peer measures llama models, and this is a {c.family}")
    config = LlamaConfig(
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
    model = LlamaForCausalLM(config)
    state = {name: checkpoint.read(name).float() for name in checkpoint.tensor_names()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or [name for name in missing if name != "lm_head.weight"]:
        raise SystemExit(f"weights do not match: missing {missing}, unexpected {unexpected}")
    return model.eval()


def measure(model: LlamaForCausalLM, workload: Workload, prompts: list[list[int]]) -> Run:
    """One greedy generate."""
    ids = torch.tensor(prompts)
    clock = FirstTokenClock()
    start = time.perf_counter()
    answers = model.generate(  # pyright: ignore[reportAttributeAccessIssue]  # its mixin's types clash
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=workload.new_tokens,
        max_new_tokens=workload.new_tokens,
        pad_token_id=0,
        stopping_criteria=[clock],
    )
    end, first = time.perf_counter(), clock.first_s or time.perf_counter()
    generated = answers.numel() - ids.numel()
    return Run(
        prompt_tokens=ids.numel(),
        generated_tokens=generated,
        start=start,
        first=first,
        end=end,
        after_first=generated - workload.batch,
    )


def main() -> None:
    """Read the task, load, measure, print."""
    task = read_task()
    torch.set_num_threads(task.threads)
    model = load(open_checkpoint(task.model))
    with torch.inference_mode():
        measure(model, Workload(1, 16, 2), [[0] * 16])  # first touches
        answer(
            task,
            f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
            lambda workload: [{}],
            lambda workload, settings, prompts: measure(model, workload, prompts),
        )


if __name__ == "__main__":
    main()
