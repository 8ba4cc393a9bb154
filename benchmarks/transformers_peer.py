"""Peer for `polypath bench engine --vs transformers`: `generate` on the same dequantized weights.

Protocol: one JSON line {"model", "threads", "workloads": [...], "repeats"} on standard input; one
JSON line of measurements on standard output, in the order of the workloads.
"""

from __future__ import annotations

import json
import sys
import time

import torch
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


def run(model: LlamaForCausalLM, workload: dict[str, int], seed: int) -> dict[str, float]:
    """One greedy generate; rates as in runtime/bench.py."""
    batch, prompt, new = (workload[k] for k in ("batch", "prompt_tokens", "new_tokens"))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (batch, prompt), generator=generator)
    clock = FirstTokenClock()
    start = time.perf_counter()
    model.generate(  # pyright: ignore[reportAttributeAccessIssue]  # its mixin's types clash
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new,
        max_new_tokens=new,
        pad_token_id=0,
        stopping_criteria=[clock],
    )
    end, first = time.perf_counter(), clock.first_s or time.perf_counter()
    return {
        "prefill_tokens_s": batch * prompt / (first - start),
        "decode_tokens_s": batch * (new - 1) / (end - first) if new > 1 else 0.0,
    }


def main() -> None:
    """Read the task, load, measure, print."""
    task = json.loads(sys.stdin.readline())
    torch.set_num_threads(task["threads"])
    model = load(open_checkpoint(task["model"]))
    with torch.inference_mode():
        run(model, {"batch": 1, "prompt_tokens": 16, "new_tokens": 2}, 0)
        runs = [
            [run(model, workload, seed) for seed in range(task["repeats"])]
            for workload in task["workloads"]
        ]
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
