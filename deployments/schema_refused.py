"""Fields that clients of other servers send and this one cannot honour, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping

from .schema import Refused

TOOLS_WHY = "tool calling is not built in this version."
GUIDED_WHY = "constrained decoding is not built in this version."
BEAM_WHY = "beam search is not built; answers are sampled."

GENERATION_REFUSED: Mapping[str, Refused] = {
    "use_beam_search": Refused(BEAM_WHY, False),
    "length_penalty": Refused(BEAM_WHY, 1, 1.0),
    "early_stopping": Refused(BEAM_WHY, False),
    "allowed_token_ids": Refused("use logit_bias.", []),
    "bad_words": Refused("use logit_bias on their tokens.", []),
    "response_format": Refused(GUIDED_WHY, {"type": "text"}),
    "structured_outputs": Refused(GUIDED_WHY, {}),
    "guided_json": Refused(GUIDED_WHY),
    "guided_regex": Refused(GUIDED_WHY),
    "guided_choice": Refused(GUIDED_WHY, []),
    "guided_grammar": Refused(GUIDED_WHY),
    "guided_decoding_backend": Refused(GUIDED_WHY),
    "regex": Refused(GUIDED_WHY),
    "ebnf": Refused(GUIDED_WHY),
    "prompt_logprobs": Refused("use /v1/completions with echo, logprobs and max_tokens 0."),
    "truncate_prompt_tokens": Refused("a prompt is never cut; shorten it before sending."),
    "truncation_side": Refused("a prompt is never cut; shorten it before sending."),
    "spaces_between_special_tokens": Refused("the tokenizer's own spacing is kept.", True),
    "return_tokens_as_token_ids": Refused("tokens are returned as text and bytes.", False),
    "return_token_ids": Refused("use /tokenize on the text.", False),
    "logits_processors": Refused("no code runs for a client."),
    "cache_salt": Refused("the prefix cache has no partitions."),
    "kv_transfer_params": Refused("keys and values do not move between workers."),
    "vllm_xargs": Refused("this is not vLLM."),
    "moderation": Refused("nothing here moderates."),
    "lora_path": Refused("adapters are not built in this version."),
    "top_a": Refused("use min_p."),
    "typical_p": Refused("use top_p or min_p.", 1, 1.0),
    "mirostat": Refused("use top_p or min_p.", 0),
}

TEMPLATE_REFUSED: Mapping[str, Refused] = {
    "chat_template": Refused("a template is the operator's choice (--chat-template)."),
    "continue_final_message": Refused(
        "an answer always begins a new message; use /v1/completions with a text you rendered.",
        False,
    ),
    "documents": Refused("pass them in a message, or with chat_template_kwargs.", []),
    "mm_processor_kwargs": Refused("models here read text only.", {}),
    "media_io_kwargs": Refused("models here read text only.", {}),
}
