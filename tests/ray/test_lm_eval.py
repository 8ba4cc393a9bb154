"""lm-evaluation-harness against the live API with the real model, without the hub: what it measures
is what the engine says in process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polypath.runtime.engine import Engine
from polypath.runtime.request import FinishReason, SamplingParams
from polypath.tests.driving import NEAR_TIE, build_engine
from polypath.tests.ray.running_server import serving

pytestmark = [pytest.mark.ray, pytest.mark.slow]

HARNESS_LIMIT_S = 300
MAX_TOKENS = 24
PLAIN = "Question: {}\nAnswer:"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
# Each with its choices, the right one first.
QUESTIONS = {
    "What is the capital of France?": [" Paris", " Berlin", " a small grey cat"],
    "What colour is the sky on a clear day?": [" blue", " green", " seventeen"],
    "How many days are in a week?": [" 7 days", " 12 days", " Monday"],
    "Which animal says meow?": [" The cat", " The dog", " The train"],
    "What do bees make?": [" honey", " milk", " a lot of money"],
    "What is the opposite of hot?": [" cold", " warm", " a pot"],
    "What is 2 + 2?": [" 4", " 5", " two"],
    "Which planet do we live on?": [" Earth", " Mars", " Planet Hollywood"],
}
ENDING = ("What is the capital of France?", "How many days are in a week?", "What is 2 + 2?")

TASK = """\
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
num_fewshot: 0
doc_to_text: prompt
target_delimiter: ""
metadata: {version: 1}
"""
CHOICES = """
task: polypath_choices
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ANSWERS = """
task: polypath_answers
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: MAX_TOKENS}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@dataclass(frozen=True, slots=True)
class Report:
    """What the harness wrote: figures by task, and each task's samples in the order of the data."""

    figures: dict[str, dict[str, float]]
    samples: dict[str, list[dict[str, Any]]]  # JSON

    def scored(self) -> list[tuple[str, str, float, bool]]:
        """Of every choice: context, continuation, its log-likelihood, whether it is greedy."""
        found: list[tuple[str, str, float, bool]] = []
        for sample in self.samples["polypath_choices"]:
            for given, ((value, is_greedy),) in zip(
                sample["arguments"].values(), sample["resps"], strict=True
            ):
                found.append((given["arg_0"], given["arg_1"], float(value), is_greedy == "True"))
        return found


@pytest.fixture(scope="module")
def engine(default_model_path: Path) -> Engine:
    """The same plan as the server's, in process."""
    return build_engine(default_model_path, pages=256, max_model_len=512)


@pytest.fixture(scope="module")
def report(
    engine: Engine,
    no_server: None,
    default_model_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Report:
    """Of one run on both tasks."""
    folder = tmp_path_factory.mktemp("lm_eval")
    write_tasks(folder, engine)
    write_tokenizer(default_model_path, folder / "tokenizer")
    with serving(["--port", "0"]) as running:
        run_harness(folder, f"{running.url}/v1/completions")
    (results,) = folder.glob("out/*/results_*.json")
    samples: dict[str, list[dict[str, Any]]] = {}
    for task in ("polypath_choices", "polypath_answers"):
        (file,) = folder.glob(f"out/*/samples_{task}_*.jsonl")
        lines = map(json.loads, file.read_text().splitlines())
        samples[task] = sorted(lines, key=lambda sample: sample["doc_id"])
    return Report(json.loads(results.read_text())["results"], samples)


def write_tasks(folder: Path, engine: Engine) -> None:
    """Two tasks on the same questions: plain ones, and chats with the model's own answer as the
    likely choice, after which it ends.
    """
    rows = [
        {"prompt": PLAIN.format(question), "choices": choices, "answer": 0}
        for question, choices in QUESTIONS.items()
    ]
    chats = [CHAT.format(question) for question in ENDING]
    for prompt, answer in zip(chats, greedy(engine, chats), strict=True):
        rows.append({"prompt": prompt, "choices": ["I do not know.", answer], "answer": 1})
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = TASK.replace("DATA", json.dumps(str(data)))
    (folder / "choices.yaml").write_text(common + CHOICES)
    answers = ANSWERS.replace("MAX_TOKENS", str(MAX_TOKENS))
    (folder / "answers.yaml").write_text(common + answers)


def write_tokenizer(gguf: Path, folder: Path) -> None:
    """The model's tokenizer as transformers reads it: the harness makes token ids with it."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)


def run_harness(folder: Path, url: str) -> None:
    """Both tasks; a try to reach anything but this machine fails."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    model = {
        "model": "SmolLM2-135M-Instruct",
        "base_url": url,
        "tokenizer_backend": "huggingface",
        "tokenizer": str(folder / "tokenizer"),
        "num_concurrent": "8",
        "max_retries": "1",
    }
    run = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
            *("--model_args", ",".join(f"{key}={value}" for key, value in model.items())),
            *("--include_path", str(folder), "--tasks", "polypath_choices,polypath_answers"),
            *("--output_path", str(folder / "out"), "--log_samples"),
        ],
        cwd=folder,
        env=os.environ | offline | nowhere | {"NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=HARNESS_LIMIT_S,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "API request failed" not in run.stderr, run.stderr[-4000:]


def greedy(engine: Engine, prompts: Sequence[str], *, stop: Sequence[str] = ()) -> list[str]:
    """Answers in process."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    return [answer.text for answer in engine.generate(list(prompts), params, stop=stop)]


def test_log_likelihoods_are_the_engines_own(report: Report, engine: Engine) -> None:
    """The harness leaves the last token out, for the one it had to ask for: so that token must be
    listed even where it ends the answer and has no text.
    """
    scored = report.scored()
    assert len(scored) == 3 * len(QUESTIONS) + 2 * len(ENDING)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    answers = engine.generate([context + more for context, more, _, _ in scored], params)
    for (context, more, value, is_greedy), answer in zip(scored, answers, strict=True):
        # Blanks at a context's end count as the continuation's: the harness's rule.
        first = len(engine.tokenizer.encode(context.rstrip()))
        assert answer.prompt_logprobs is not None
        own = [entry for entry in answer.prompt_logprobs[first:] if entry is not None]
        assert value == pytest.approx(sum(entry.logprob for entry in own), abs=NEAR_TIE), more
        assert is_greedy == all(entry.rank == 1 for entry in own), more
    reasons = [answer.finish_reason for answer in answers]
    assert reasons.count(FinishReason.STOP) >= len(ENDING), "no choice ends the answer"
    assert sum(is_greedy for *_, is_greedy in scored) >= len(ENDING)


def test_accuracy_follows_from_the_log_likelihoods(report: Report) -> None:
    samples = report.samples["polypath_choices"]
    is_right: list[bool] = []
    for sample in samples:
        values = [float(value) for ((value, _),) in sample["resps"]]
        is_right.append(values.index(max(values)) == sample["doc"]["answer"])
    found = report.figures["polypath_choices"]["acc,none"]
    assert found == pytest.approx(sum(is_right) / len(samples))
    assert found >= 0.7  # a model whose text is noise would be right in one of three


def test_generated_answers_are_the_engines_own(report: Report, engine: Engine) -> None:
    samples = report.samples["polypath_answers"]
    prompts = [sample["doc"]["prompt"] for sample in samples]
    texts = [text for sample in samples for (text,) in sample["resps"]]
    assert texts == greedy(engine, prompts, stop=("\n",))
    assert sum(bool(text.strip()) for text in texts) >= len(texts) / 2, texts
