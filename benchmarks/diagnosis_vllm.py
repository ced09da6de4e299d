"""What `diagnose` says of causes that a real vLLM makes: one engine on the CPU per format of its log-probs.

A tiny Qwen2 with random weights is made on the spot (its head reads only half of what each token's embedding holds, so
that some contexts are nearly certain and some nearly flat). vLLM samples from it in BF16 under each setting of `CASES`,
transformers score the same tokens in FP32, and `diagnose` reads the dump that comes of both; the dump's metadata do not
name the setting. An engine takes about a minute; `--write` puts the table into docs/diagnosis.md.

    python benchmarks/diagnosis_vllm.py [--only NAME,NAME] [--results FILE] [--dumps FOLDER] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "diagnosis.md"
BEGIN, END = "<!-- written by benchmarks/diagnosis_vllm.py -->", "<!-- end of vllm -->"
VOCABULARY, WIDTH, EOS = 256, 64, 1
PROMPTS, GROUP, LENGTH, PROMPT = 32, 8, 64, 6
ALLOWED = range(200)
"""The ids that a mask on the vocabulary leaves."""


@dataclass(frozen=True)
class Case:
    """A setting of vLLM's `SamplingParams`, how the engine reports log-probs, and what the diagnosis has to say: the
    cause (None: none to act on). `trained_at`: the trainer's temperature. `dtype`: the engine's.
    """

    name: str
    cause: str | None
    sampling: dict[str, Any] = field(default_factory=dict)
    logprobs: str = "processed_logprobs"
    trained_at: float = 1.0
    dtype: str = "bfloat16"


CASES: tuple[Case, ...] = (
    Case("BF16 alone", None),
    Case("FP32", None, dtype="float32"),
    Case("temperature .7", "temperature", {"temperature": 0.7}),
    Case("temperature .95", "temperature", {"temperature": 0.95}),
    Case("temperature 1.2", "temperature", {"temperature": 1.2}),
    Case("raw log-probs, both sides at .7", "temperature", {"temperature": 0.7}, "raw_logprobs", 0.7),
    Case("top-p .9", "truncation", {"top_p": 0.9}),
    Case("top-p .98", "truncation", {"top_p": 0.98}),
    Case("top-k 20", "truncation", {"top_k": 20}),
    Case("min-p .05", "truncation", {"min_p": 0.05}),
    Case("repetition penalty 1.1", "penalty", {"repetition_penalty": 1.1}),
    Case("presence penalty .5", "penalty", {"presence_penalty": 0.5}),
    Case("frequency penalty .3", "penalty", {"frequency_penalty": 0.3}),
    Case("vocabulary mask", "vocabulary", {"allowed_token_ids": list(ALLOWED)}),
    Case("raw log-probs, top-p .9", None, {"top_p": 0.9}, "raw_logprobs"),
)


def save_model(folder: Path, seed: int = 0) -> None:
    """A Qwen2 in FP32. Half of the residual stream is invisible to the head and differs in size from token to token."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=2 * WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=EOS,
        tie_word_embeddings=False,
        initializer_range=0.08,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
        embedding.normal_()
        embedding[:, WIDTH:] *= torch.exp(1.2 * torch.randn(VOCABULARY, 1))
        head.normal_(std=0.55)
        head[:, WIDTH:] = 0.0
        head[EOS] *= 0.9
    model.save_pretrained(folder)


def sampled(folder: Path, cases: list[Case]) -> Iterator[tuple[Case, list[list[int]], list[Any]]]:
    """Prompts, and vLLM's answers, of each case; all of one engine."""
    import torch
    from vllm import LLM, SamplingParams

    (logprobs,), (dtype,) = {one.logprobs for one in cases}, {one.dtype for one in cases}
    engine = LLM(
        str(folder), skip_tokenizer_init=True, dtype=dtype, logprobs_mode=logprobs, enforce_eager=True, seed=0,
        max_model_len=128, max_num_seqs=128, enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(2, ALLOWED.stop, (PROMPTS, PROMPT), generator=generator).tolist()
    for case in cases:
        settings = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0} | case.sampling
        parameters = SamplingParams(
            n=GROUP, max_tokens=LENGTH, logprobs=0, detokenize=False, seed=11, stop_token_ids=[EOS], **settings
        )
        told = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
        yield case, prompts, told


def scored(model: Any, ids: Any, temperature: float) -> Any:
    """(B, T, V) FP32 log-probs of what follows each token."""
    import torch

    with torch.no_grad():
        return (model(ids).logits.float() / temperature).log_softmax(-1)


def update_of(case: Case, prompts: list[list[int]], told: list[Any], model: Any) -> tuple[Any, float]:
    """What a trainer would dump, and the mean mass S that the trainer gives to what the engine may sample."""
    import numpy as np
    import torch

    from verl_rollout_corr.dumps.writer import Update

    rows = [(number, answer) for number, one in enumerate(told) for answer in one.outputs]
    lengths = np.array([len(answer.token_ids) for _, answer in rows])
    inside = np.arange(LENGTH)[None, :] < lengths[:, None]
    ids, rollout = np.zeros((len(rows), LENGTH), np.int64), np.zeros((len(rows), LENGTH))
    for row, (_, answer) in enumerate(rows):
        ids[row, : lengths[row]] = answer.token_ids
        rollout[row, : lengths[row]] = [
            entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)
        ]
    whole = torch.tensor(np.concatenate([[prompts[number] for number, _ in rows], ids], axis=1))
    behind = torch.cat([scored(model, part, case.trained_at) for part in whole.split(64)])[:, PROMPT - 1 : -1]
    train = behind.gather(2, torch.tensor(ids)[..., None])[..., 0].numpy()
    mass = kept_mass(case, behind)
    update = Update(
        step=1,
        lengths=lengths,
        response_mask=inside,
        rollout_log_probs=np.where(inside, rollout, 0.0).astype(np.float32),
        train_log_probs=np.where(inside, train, 0.0).astype(np.float32),
        response_ids=ids,
        uid=[f"p{number}" for number, _ in rows],
        lag=np.zeros(len(rows), np.int64),
        prompt_lengths=np.full(len(rows), PROMPT),
    )
    return update, float(mass[torch.tensor(inside)].mean())


def kept_mass(case: Case, log_probs: Any) -> Any:
    """(B, T) mass of the trainer's distribution that top-p, top-k, min-p or a mask keeps, by their definitions."""
    import torch

    probabilities = log_probs.exp()
    ordered = probabilities.sort(dim=-1, descending=True).values
    if (share := case.sampling.get("top_p")) is not None:
        before = ordered.cumsum(-1) - ordered
        return torch.where(before < share, ordered, 0.0).sum(-1)
    if (count := case.sampling.get("top_k")) is not None:
        return ordered[..., :count].sum(-1)
    if (least := case.sampling.get("min_p")) is not None:
        return torch.where(ordered >= least * ordered[..., :1], ordered, 0.0).sum(-1)
    if "allowed_token_ids" in case.sampling:
        return probabilities[..., list(ALLOWED)].sum(-1)
    return torch.ones_like(ordered[..., 0])


def judged(case: Case, update: Any, mass: float, folder: Path) -> dict[str, Any]:
    """What `diagnose` says of the dump, against what is true."""
    from verl_rollout_corr.diagnosis.causes import ALARMS
    from verl_rollout_corr.diagnosis.diagnose import diagnose
    from verl_rollout_corr.dumps.schema import Facts
    from verl_rollout_corr.dumps.writer import write_dump

    file = folder / f"{case.name.replace(' ', '_')}.parquet"
    write_dump(file, update, Facts(tokenizer={"eos": EOS}, response_length=LENGTH))
    found = diagnose(file)
    size = found.size
    assert size is not None
    alarms = {one.cause: one for one in found.findings if one.cause in ALARMS}
    values = alarms[case.cause].values if case.cause in alarms else {}
    truth = told = None
    if case.cause == "temperature":
        raw = case.logprobs == "raw_logprobs"
        truth, told = 1 / case.trained_at if raw else case.sampling["temperature"], values.get("temperature")
    elif case.cause in ("truncation", "vocabulary"):
        truth, told = mass, values.get("kept_mass")
    return {
        "name": case.name,
        "cause": case.cause,
        "tokens": size.tokens,
        "rms": size.rms,
        "k3": size.k3,
        "correlation": size.pearson,
        "alarms": sorted(alarms),
        "others": sorted(one.cause for one in found.findings if one.cause not in ALARMS),
        "truth": truth,
        "told": told,
        "verdict": found.verdict,
    }


def run_engine(cases: list[Case], results: Path, dumps: Path | None) -> None:
    """Everything of one engine; a line of JSON per case, and a dump of each where a folder for them is named."""
    from transformers import Qwen2ForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        model, dumps = Path(folder) / "model", dumps or Path(folder) / "dumps"
        dumps.mkdir(exist_ok=True, parents=True)
        save_model(model)
        trainer = Qwen2ForCausalLM.from_pretrained(model).float().eval()
        with results.open("a") as file:
            for case, prompts, told in sampled(model, cases):
                file.write(json.dumps(judged(case, *update_of(case, prompts, told, trainer), dumps)) + "\n")
                file.flush()


def run(cases: list[Case], results: Path, dumps: Path | None = None) -> None:
    """Adds a line per case to the results, each engine in a process of its own. Raises CalledProcessError."""
    engines: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        engines.setdefault((case.dtype, case.logprobs), []).append(case)
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
    }
    for some in engines.values():
        words = [sys.executable, __file__, "--engine", json.dumps([asdict(one) for one in some]), "--results"]
        words += [str(results), *([] if dumps is None else ["--dumps", str(dumps)])]
        subprocess.run(words, env=environment, check=True, stdout=sys.stderr)


def read(results: Path) -> list[dict[str, Any]]:
    """The last result of each case, in the order of `CASES`."""
    last = {one["name"]: one for one in map(json.loads, results.read_text().splitlines())}
    return [last[case.name] for case in CASES if case.name in last]


def table(results: list[dict[str, Any]]) -> str:
    """For the page."""
    lines = [
        "| vLLM's setting | tokens | root mean square of l | cause that it is | named | value | truth |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in results:
        named = ", ".join(one["alarms"]) or ", ".join(one["others"]) or "nothing"
        told, truth = ("-" if one[key] is None else f"{one[key]:.4f}" for key in ("told", "truth"))
        lines.append(
            f"| {one['name']} | {one['tokens']:,} | {one['rms']:.2g} | {one['cause'] or '-'} | {named} | {told} "
            f"| {truth} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=None, help="cases by name, with commas")
    parser.add_argument("--results", type=Path, default=Path("diagnosis_vllm_results.jsonl"), help="a line per case")
    parser.add_argument("--dumps", type=Path, default=None, help="where to keep a dump per case")
    parser.add_argument("--write", action="store_true", help=f"replace the table of {PAGE.name}")
    parser.add_argument("--engine", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        run_engine([Case(**one) for one in json.loads(options.engine)], options.results, options.dumps)
        return
    start = time.time()
    run(
        [case for case in CASES if options.only is None or case.name in options.only.split(",")],
        options.results,
        options.dumps,
    )
    results = read(options.results)
    print(table(results))
    print(f"{time.time() - start:.0f} s", file=sys.stderr)
    if options.write:
        page = PAGE.read_text()
        head, tail = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
        PAGE.write_text(f"{head}\n\n{table(results)}\n\n{tail}")


if __name__ == "__main__":
    main()
