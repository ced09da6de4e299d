"""Every name that two processes must agree on, in one place: columns, entries beside them, metric keys, and entries of
verl's configuration.
"""

from __future__ import annotations

# Columns of a batch, one entry per row or per response token.

KEEP = "rollout_corr_keep"
"""Decoupled mode, (B, T): the trainer's decision, 1 where training may use the token."""

WEIGHTS = "rollout_is_weights"
"""Decoupled mode, (B, T) float32: the weights, under the name that verl's losses read."""

STALENESS = "rollout_corr_staleness"
"""Bypass mode, (B,) int64: how many published versions old the weights were that sampled the row; -1 unknown."""

ROW = "rollout_corr_row"
"""(B,) int64: the number of the row in the trainer's batch."""

DIGEST = "rollout_corr_digest"
"""(B,) int64: the digest of what the trainer decided on the row (`proof.decision_digests`)."""

VOTES = "rollout_corr_row_kept"
"""(B,) bool: with `baseline: kept`, the rows that count in their group's baseline."""

CHECKED_SAMPLE = "rollout_corr_checked_sample"
"""RayPPOTrainer and its descendants, one entry per row: True where the process of the agent loop has compared the
numbers of log-probs and tokens.
"""

# Entries beside the columns, one per batch.

HORIZON = "rollout_corr_horizon"
"""The longest response that the run allows, in tokens: what `seq-mean-token-sum-norm` divides by."""

UPDATE = "rollout_corr_update"
"""The number of the update, counted by the trainer: no other one has it."""

BATCH_DIGEST = "rollout_corr_batch_digest"
"""The digests of all rows of the update together, as an int64."""

DECIDED_WITH = "rollout_corr_decided_with"
"""The trainer's configuration, as JSON text."""

TRAINED_WITH = "rollout_corr_trained_with"
"""What verl's trainer tells its actors about an update, as JSON text (`share.sent_along`)."""

TABLES = "rollout_corr_tables"
"""The trainer's constants and tables of the definition, as JSON text (`tables.py`)."""

KEPT_TOKENS = "rollout_corr_kept_tokens"
"""With `denominator: kept`, the kept tokens of the mini-batch over all ranks."""

KEPT_SEQUENCES = "rollout_corr_kept_sequences"
"""With `denominator: kept`, the rows of the mini-batch with a kept token, over all ranks."""

# Metrics that carry more than a number. The trainer takes them out before a tracker sees them.

APPLIED_METRIC = "rollout_corr/applied"
"""Both modes: the micro-batch's `Applied`."""

SUMS_METRIC = "rollout_corr/sums"
"""Bypass mode: the micro-batch's `Sums`."""

STATISTICS_METRIC = "rollout_corr/statistics"
"""fully_async: one update's `UpdateStatistics`, on its way to the aggregator."""

# What stands for a sample.

ROLLOUTER_FAILED = "rollout_corr_rollouter_failed: "
"""fully_async: the beginning of the end signal of a rollouter that stops with an exception."""

# Environment of the processes of a run.

CODE_VARIABLE = "VERL_ROLLOUT_CORR_CODE"
"""Version and digest of this package in the driver (`same_code.fingerprint`)."""

# Entries of verl's configuration.

CONFIG_JSON = "rollout_corr"
"""In the actors' `policy_loss` node and the trainers' `rollout_correction` node: our configuration, as JSON text."""

HOOKED_TRAINER = "rollout_corr_trainer"
"""In the actors' `policy_loss` node: the hooked trainer writes its name there before it starts them."""
