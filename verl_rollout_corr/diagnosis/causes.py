"""The table of causes: what each is called, and what to change. Detectors and docs/diagnosis.md use its keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One row: `key` for programs, `title` for people, `change`: what to do about it."""

    key: str
    title: str
    change: str


CAUSES: dict[str, Cause] = {
    cause.key: cause
    for cause in (
        Cause(
            "sentinel",
            "a stand-in where the engine has no log-prob",
            "Find why the engine returned no log-prob for these tokens (truncated answers, aborted requests); until "
            "then rollout_corr.invalid=reject leaves such sequences out and counts them.",
        ),
        Cause(
            "zeros",
            "log-probs that are missing, stored as 0.0",
            "See that the engine returns a log-prob for every sampled token, and that the agent loop passes them on "
            "unchanged (speculative decoding, partial rollouts and retries are where they get lost).",
        ),
        Cause(
            "constant",
            "one constant in place of log-probs",
            "The engine's log-probs were not asked for or were filled in: set "
            "actor_rollout_ref.rollout.calculate_log_probs=true, and look for a default value in the agent loop.",
        ),
        Cause(
            "units",
            "numbers that are not the natural log-prob of one token",
            "Convert the numbers where the engine's answer is read. A log-prob is the natural logarithm of one token's "
            "probability: at most 0, one per token. Multiply base 2 by 0.6931, and base 10 by 2.3026.",
        ),
        Cause(
            "other_token",
            "log-probs of another token than the sampled one",
            "Look the log-prob up under the id of the sampled token. Engines list the likeliest tokens first, and the "
            "sampled token may be elsewhere in the list.",
        ),
        Cause(
            "shift",
            "log-probs shifted against the tokens",
            "One side's log-probs belong to the neighbouring token: compare logits[t] with token t + 1 once, and look "
            "for a prompt token (or a BOS) that one side counts and the other does not.",
        ),
        Cause(
            "permuted",
            "rows in another order on the two sides",
            "Join engine and trainer by the request's id, not by order: results that arrive as they finish, or a "
            "balancing that reorders one tensor and not the other.",
        ),
        Cause(
            "not_loaded",
            "the engine runs other weights",
            "The two sides describe unrelated models: check that the weights are loaded and synchronised before the "
            "first rollout (load_format: dummy is never overwritten where the synchronisation fails). If they are, "
            "compare the ids that each side sees: another tokenizer or another prompt looks the same.",
        ),
        Cause(
            "stale",
            "a part of the rows was sampled by older weights",
            "Rows of old weights carry the mismatch: lower the allowed staleness, or correct them "
            "(+rollout_corr=token_is, or reject by lag).",
        ),
        Cause(
            "drift",
            "the mismatch grows from step to step",
            "At equal weights it should stay: check that every tensor reaches the engine at each synchronisation (tied "
            "embeddings, buffers, adapters), and restart the engine once to see whether the mismatch falls back.",
        ),
        Cause(
            "temperature",
            "a temperature on one side only",
            "Divide the trainer's logits by the temperature of the rollout (verl: actor_rollout_ref.rollout."
            "temperature is used on both sides), or make the engine return processed log-probs.",
        ),
        Cause(
            "truncation",
            "truncated sampling (top-p, top-k or min-p), renormalised by the engine",
            "Set top_p=1, top_k=-1 and min_p=0 for training rollouts. With truncation every ratio is off by the kept "
            "mass, and geometric bands (geo_rs) reject every row.",
        ),
        Cause(
            "vocabulary",
            "a mask on the vocabulary, or a constant offset",
            "The engine gives some ids no probability (padding ids of the embedding, logit_bias, allowed or bad words) "
            "and the trainer does: mask the same ids in the trainer, or none.",
        ),
        Cause(
            "penalty",
            "a penalty on tokens that came before",
            "Set repetition_penalty=1, presence_penalty=0 and frequency_penalty=0 for training rollouts (a model's "
            "generation_config.json may set them).",
        ),
        Cause(
            "token",
            "one token id (EOS, or one of a template)",
            "Look at this id alone: a token that the framework appends, a stop string, a token with a bias or with an "
            "embedding that is not synchronised.",
        ),
        Cause(
            "position",
            "a mismatch that grows with the position",
            "Compare the rotary tables of both sides: inverse frequencies have to be computed and kept in float32 "
            "(rounded to BF16 the angle is off by position x 2^-9), with the same scaling. Compare the attention "
            "window and the format of the key-value cache too.",
        ),
        Cause(
            "boundary",
            "the first or last token of each response or turn",
            "Print the ids around this place on both sides. Often one side has a token more or less before it (BOS, "
            "the end of the chat template, padding), or scores a token that the framework appended.",
        ),
        Cause(
            "prompt",
            "another prompt before the response on the two sides",
            "Print the prompt's ids of one row on both sides. Usual differences: the chat template applied twice, a "
            "BOS or a system prompt on one side alone, a prompt cut at another length, padding that attention sees.",
        ),
        Cause(
            "outliers",
            "a few tokens with a mismatch of their own",
            "Look at these tokens alone (the same ones again in a second run are deterministic: a kernel's path, an "
            "expert's routing). A veto (+rollout_corr=veto) or token truncation bounds what they do.",
        ),
        Cause(
            "truncated_tail",
            "no log-probs behind the engine's length",
            "The engine's limit (max_model_len, max_tokens or its log-probs' buffer) is below the trainer's: raise it, "
            "or mask what is behind it.",
        ),
        Cause(
            "mask",
            "a response mask on tokens that the policy did not sample",
            "Whole blocks under the mask have no log-prob of the engine: tool, user or padding tokens. Set "
            "response_mask to 0 there.",
        ),
        Cause(
            "length",
            "products over the sequence that cannot survive this length",
            "Do not use seq_sum weights or sums at this length: token or seq_mean weights, and means for rejection.",
        ),
        Cause(
            "low_precision",
            "the numerical precision of the two engines",
            "Nothing is wrong: this is what BF16 costs. FP16 rollouts, FP32 logits in the engine or a correction "
            "(+rollout_corr=token_is) make it smaller.",
        ),
        Cause(
            "stored_precision",
            "log-probs stored in BF16",
            "Keep log-probs in float32 from the logits on: BF16 cannot hold their difference.",
        ),
        Cause(
            "unknown",
            "none of the causes that are looked for",
            "What it is not is listed. Compare both sides' logits on one prompt, layer by layer.",
        ),
    )
}
"""Every cause."""

ALARMS = frozenset(CAUSES) - {"low_precision", "length"}
"""Causes that mean that something is wrong. The others are normal, or warn about a choice."""
