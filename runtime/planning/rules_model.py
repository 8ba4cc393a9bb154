"""Rules about the model and the values of a plan: types, pages, heads, windows, drafts, modes."""

from __future__ import annotations

from ..forward_mode import ForwardMode
from .capability import Capability
from .quantization import why_not_width
from .rule import Verdict, rule
from .situation import Situation

width = rule(
    "quantization",
    "unavailable",
    refuses="a linear method that does not give the bits of `--quantization`",
    source="SGLang #18550: asked for one thing, got another, and no error",
)(why_not_width)


@rule(
    "dtype",
    "correctness",
    refuses="a candidate that does not compute in the plan's type",
    source="FlashInfer and FlashAttention: float16 and bfloat16 only",
)
def in_dtype(capability: Capability, situation: Situation) -> Verdict | None:
    accepted = capability.dtypes_for(situation.device)
    if situation.device not in capability.devices or situation.dtype in accepted:
        return None
    return (
        f"{capability.name} computes in {', '.join(accepted)} on {situation.device}; "
        f"this plan is for {situation.dtype}",
        f"--dtype {accepted[0]}" if accepted else f"another device than {situation.device}",
    )


@rule(
    "kv_dtype",
    "correctness",
    refuses="attention that does not read keys and values in the type of `--kv-dtype`",
    source="SGLang #18550: fa3 with fp8_e5m2 silently became triton; vLLM #26431, #7714: fp8 "
    "on cards without it",
)
def reads_kv_dtype(capability: Capability, situation: Situation) -> Verdict | None:
    accepted = capability.kv_dtypes or (situation.dtype,)
    if capability.kind != "attention" or situation.kv_dtype in accepted:
        return None
    return (
        f"{capability.name} reads keys and values in {', '.join(accepted)}; "
        f"this plan stores {situation.kv_dtype}",
        f"--kv-dtype {accepted[0]}",
    )


@rule(
    "page_size",
    "correctness",
    refuses="attention over pages of a size it does not take",
    source="SGLang #28825, dynamo #13216 (16 became 64 in silence), #14800 (found at run time)",
)
def takes_pages(capability: Capability, situation: Situation) -> Verdict | None:
    accepted = capability.page_sizes
    if accepted is None or situation.page_size in accepted:
        return None
    sizes = ", ".join(map(str, accepted))
    return (
        f"{capability.name} takes pages of {sizes} tokens; this plan has {situation.page_size}",
        f"--page-size {accepted[0]}",
    )


@rule(
    "head_dim",
    "correctness",
    refuses="attention over heads of a size it does not take",
    source="SGLang #6044: Gemma3's heads; FlashInfer's kernels are made for few sizes",
)
def takes_head_dim(capability: Capability, situation: Situation) -> Verdict | None:
    accepted, found = capability.head_dims, situation.model.head_dim
    if accepted is None or found in accepted:
        return None
    few = ", ".join(map(str, accepted)) if len(accepted) < 9 else f"{accepted[0]} to {accepted[-1]}"
    return (
        f"{capability.name} takes head dimensions {few}; this model has {found}",
        "a model with one of these head dimensions",
    )


@rule(
    "group_size",
    "correctness",
    refuses="attention with more query heads for each key/value head than it takes",
    source="FlashInfer's decode kernel knows few group sizes",
)
def takes_group(capability: Capability, situation: Situation) -> Verdict | None:
    limit, found = capability.max_group_size, situation.model.group_size
    if limit is None or found <= limit:
        return None
    return (
        f"{capability.name} takes {limit} query heads for each key/value head; "
        f"this model has {found}",
        f"a model with at most {limit}",
    )


@rule(
    "sliding_window",
    "correctness",
    refuses="attention without windows for a model that has them",
    source="SGLang's matrix of backends, edited by hand, says No where the code says yes",
)
def has_windows(capability: Capability, situation: Situation) -> Verdict | None:
    windows = sorted({w for w in situation.model.layer_windows if w is not None})
    if capability.kind != "attention" or capability.sliding_window or not windows:
        return None
    return (
        f"{capability.name} has no sliding window; layers of this model see only the last "
        f"{windows[0]} tokens",
        "a model without sliding windows",
    )


@rule(
    "soft_cap",
    "correctness",
    refuses="attention that does not bound its logits for a model that asks for it",
    source="FlashInfer and FlashAttention compile the cap in or leave it out; Gemma 2 has one",
)
def has_soft_cap(capability: Capability, situation: Situation) -> Verdict | None:
    cap = situation.model.attention_soft_cap
    if capability.kind != "attention" or capability.soft_cap or cap is None:
        return None
    return (
        f"{capability.name} does not cap attention logits; this model caps them at {cap:g}",
        "a model without a cap",
    )


@rule(
    "attention_sinks",
    "correctness",
    refuses="attention without learned sinks for a model that has them (gpt-oss)",
    source="vLLM #28589; SGLang: flashinfer is not chosen with sinks, FlashAttention 2 has none",
)
def has_sinks(capability: Capability, situation: Situation) -> Verdict | None:
    if capability.kind != "attention" or capability.attention_sinks:
        return None
    if not situation.model.attention_sinks:
        return None
    return (
        f"{capability.name} has no attention sinks; each head of this model learned one",
        "a model without sinks",
    )


@rule(
    "speculation.width",
    "correctness",
    refuses="attention that checks fewer drafted tokens of a request in one step than asked",
    source="SGLang #36352: NGRAM with torch_native was accepted and crashed in verify; vLLM #49547",
)
def takes_width(capability: Capability, situation: Situation) -> Verdict | None:
    limit, asked = capability.draft_width, situation.draft_width
    if capability.kind != "attention" or asked <= limit:
        return None
    return (
        f"{capability.name} checks {limit} token of a request in one step; {asked} were asked",
        "no speculation" if limit == 1 else f"at most {limit} drafted tokens",
    )


@rule(
    "speculation.tree",
    "correctness",
    refuses="attention without tree masks, for drafts that branch",
    source="SGLang #13352: EAGLE3 with top-k above 1 crashed; #9784: with pages above 1 its "
    "results were wrong",
)
def takes_trees(capability: Capability, situation: Situation) -> Verdict | None:
    if capability.kind != "attention" or capability.draft_trees or not situation.is_draft_tree:
        return None
    return (
        f"{capability.name} checks a chain of drafted tokens; these branch (top-k above 1)",
        "one drafted token for each position",
    )


@rule(
    "mode",
    "unavailable",
    refuses="a candidate in a mode that it does not run",
    source="SGLang #28825: one of two backend fields was looked at",
)
def runs_mode(capability: Capability, situation: Situation) -> Verdict | None:
    if situation.mode is None or situation.mode in capability.modes:
        return None
    modes = ", ".join(capability.modes)
    return (
        f"{capability.name} does not run {situation.mode} batches",
        f"it is for {modes}; another candidate runs the other modes of the same plan",
    )


@rule(
    "adapter",
    "unavailable",
    refuses="what is known and not built in this version",
    source="vLLM: refuse what nobody declared",
)
def is_built(capability: Capability, situation: Situation) -> Verdict | None:
    if capability.built:
        return None
    return (
        f"this version has no adapter for {capability.name}",
        f"a version of Polypath that has {capability.source}",
    )


GRAPH_LEVELS = ("never", "single_token", "uniform", "always")
"""What attention allows inside a graph, least first."""

NEEDED_LEVEL = {
    ForwardMode.DECODE: "single_token",
    ForwardMode.DRAFT: "single_token",
    ForwardMode.VERIFY: "uniform",
    ForwardMode.PREFILL: "always",
    ForwardMode.MIXED: "always",
}
"""What a graph of a whole step needs of attention: one token a request, equal numbers, any."""


@rule(
    "graph_support",
    "unavailable",
    refuses="a graph of whole steps over attention that may not be captured in that mode",
    source="vLLM #49547: with speculation the graph mode fell to piecewise without a word; SGLang "
    "#38943: accepted, then crashed at capture",
)
def may_capture_attention(
    runner: Capability, other: Capability, mode: ForwardMode
) -> Verdict | None:
    if other.kind != "attention" or not runner.captures_attention:
        return None
    needed = NEEDED_LEVEL.get(mode, "always")
    if GRAPH_LEVELS.index(other.graph_support) >= GRAPH_LEVELS.index(needed):
        return None
    lift = "another attention backend, or a runner that captures piecewise"
    if other.graph_support == "never":
        return f"{runner.name} captures attention, which {other.name} does not allow", lift
    return (
        f"{runner.name} captures attention of {mode} batches; {other.name} allows that for "
        f"{other.graph_support} batches",
        lift,
    )


@rule(
    "graph_support.native",
    "unavailable",
    refuses="a CPU graph over anything that is no native kernel",
    source="SGLang: CPU graphs with a backend that has no capture methods end in AttributeError",
)
def may_capture_kernels(runner: Capability, other: Capability, mode: ForwardMode) -> Verdict | None:
    is_captured = other.kind != "attention" or runner.captures_attention
    if not runner.captures_native or not is_captured or other.native_kernels:
        return None
    return (
        f"{runner.name} captures native kernels alone, and {other.name} runs others",
        "native kernels for attention, ops and linear layers, or --runner eager",
    )


MODEL_RULES = (
    width,
    in_dtype,
    reads_kv_dtype,
    takes_pages,
    takes_head_dim,
    takes_group,
    has_windows,
    has_soft_cap,
    has_sinks,
    takes_width,
    takes_trees,
    runs_mode,
    is_built,
)
PAIR_RULES = (may_capture_attention, may_capture_kernels)
"""Asked of a runner and each thing it would launch."""
