"""The detector of log-probs of another model: in all rows, or in some steps, rows or positions."""

from __future__ import annotations

import numpy as np

from verl_rollout_corr.diagnosis.explained import FAR, Explained, finding, not_found, share_of
from verl_rollout_corr.diagnosis.sampler import within_contexts
from verl_rollout_corr.diagnosis.view import MISSING, View

_ALIKE = 0.9  # a correlation of two sides of one model
_NOISE = 0.15  # the typical noise of l within a context of one model


def unrelated(view: View, total: int) -> Explained:
    """Whether the two sides are hardly correlated, as with other weights. `total`: tokens before any explanation."""
    nothing = np.zeros(len(view), bool)
    if len(view) < max(50, 0.3 * total):
        return Explained(None, nothing)
    train, rollout = (values.clip(min=-MISSING) for values in (view.train, view.rollout))
    same = _agree_in_contexts(view)
    for part in () if same else (_steps(view, train, rollout), _rows(view, train, rollout)):
        if part is not None:
            tokens, said = part
            values = {"correlation": _correlation(train[tokens], rollout[tokens]), "fraction": float(tokens.mean())}
            return Explained(finding("not_loaded", share_of(view, tokens), 0.95, (said,), values), tokens)
    correlation = _correlation(train, rollout)
    rms = float(np.sqrt((view.log_ratio**2).mean()))
    evidence = f"the log-probs correlate by {correlation:.3f}, l is {rms:.3g} in the root mean square"
    if not _unlike(train, rollout):
        return Explained(None, nothing, (not_found("not_loaded", evidence),))
    behind = _behind(view, train, rollout)
    if behind is not None:
        place, tokens, said = behind
        return Explained(finding("position", share_of(view, tokens), 0.9, (said,), {"position": float(place)}), tokens)
    if same:
        evidence += "; but in contexts that rows share it is a line over log pi, as of one model"
        return Explained(None, nothing, (not_found("not_loaded", evidence),))
    alike = _agreeing(train, rollout)
    if alike > 0.25:
        more = f"{alike:.0%} of the uncertain tokens agree: the others have log-probs of another model, such as a draft"
        return Explained(finding("not_loaded", 1.0, 0.6, (evidence, more), {"correlation": correlation}), ~nothing)
    return Explained(finding("not_loaded", 1.0, 0.95, (evidence,), {"correlation": correlation}), ~nothing)


def _agree_in_contexts(view: View) -> bool:
    """Whether l differs between the tokens of one context by what a temperature makes, and noise: then a sampler or a
    mask makes it large, and not another model.
    """
    slope, _, left = within_contexts(view)
    return slope.error < 0.02 and left < _NOISE


def _correlation(train: np.ndarray, rollout: np.ndarray) -> float:
    spread = train.var() + rollout.var()
    if len(train) and min(train.var(), rollout.var()) > 0:
        return float(np.corrcoef(train, rollout)[0, 1])
    return 0.0 if spread > 0 else 1.0  # one side, or both, is one number


def _agreeing(train: np.ndarray, rollout: np.ndarray) -> float:
    """The share of tokens that are not likely on either side whose two log-probs are close."""
    uncertain = np.maximum(train, rollout) < -0.5
    return float((np.abs(train - rollout)[uncertain] < 0.1).mean()) if uncertain.sum() >= 50 else 0.0


def _unlike(train: np.ndarray, rollout: np.ndarray) -> bool:
    # l is cut where a token's probability is beyond e^-20; so are the log-probs that it is held against.
    square = float(((train - rollout).clip(-MISSING, MISSING) ** 2).mean())
    variances = sorted((train.var(), rollout.var()))
    # Weights that were never loaded give every token nearly the same probability, whatever that correlates with.
    unlike = _correlation(train, rollout) < 0.6 or variances[0] < 0.05 * variances[1]
    # Where the engine leaves tokens out, no sampled token gains. Under another model some do.
    unlike = unlike and float((train - rollout > FAR).mean()) > 0.002
    return bool(unlike and square > 0.01 and square > 0.5 * sum(variances))


def _steps(view: View, train: np.ndarray, rollout: np.ndarray) -> tuple[np.ndarray, str] | None:
    """The tokens of some steps, if they are unlike and those of the other steps are alike."""
    step = view.sample.batch.step[view.row]
    kinds = np.unique(step)
    if len(kinds) < 2:
        return None
    unlike = [
        int(kind)
        for kind in kinds
        if (step == kind).sum() >= 50 and _unlike(train[step == kind], rollout[step == kind])
    ]
    tokens = np.isin(step, unlike)
    if not unlike or tokens.all() or _correlation(train[~tokens], rollout[~tokens]) < _ALIKE:
        return None
    steps = (
        f"{unlike[0]} to {unlike[-1]}" if len(unlike) == unlike[-1] - unlike[0] + 1 > 2 else ", ".join(map(str, unlike))
    )
    return tokens, (
        f"in the steps {steps} the log-probs correlate by {_correlation(train[tokens], rollout[tokens]):.3f}, in the "
        f"others by {_correlation(train[~tokens], rollout[~tokens]):.3f}"
    )


def _rows(view: View, train: np.ndarray, rollout: np.ndarray) -> tuple[np.ndarray, str] | None:
    """The tokens of some rows, if they are unlike and those of the other rows are alike."""
    count = np.maximum(np.bincount(view.row), 1)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.bincount(view.row, values) / count

    a, b = mean(train), mean(rollout)
    spread = mean(train**2) - a**2 + mean(rollout**2) - b**2
    off = (count >= 12) & (mean((train - rollout) ** 2) > np.maximum(0.5 * spread, 1.0))
    tokens = off[view.row]
    if off.sum() < max(3, 0.02 * len(np.unique(view.row))) or tokens.mean() > 0.9:
        return None
    if not _unlike(train[tokens], rollout[tokens]) or _correlation(train[~tokens], rollout[~tokens]) < _ALIKE:
        return None
    # A mask on the vocabulary makes large ratios in some contexts, and the row's other tokens agree.
    if _agreeing(train[tokens], rollout[tokens]) > 0.25:
        return None
    square = mean((train - rollout) ** 2)
    # A sampler differs more in some rows than in others, but not by this much.
    if np.median(square[off]) < 50 * np.median(square[~off & (count >= 12)]):
        return None
    return tokens, (
        f"in {off.sum()} of {len(np.unique(view.row))} rows the log-probs correlate by "
        f"{_correlation(train[tokens], rollout[tokens]):.3f}, in the others by "
        f"{_correlation(train[~tokens], rollout[~tokens]):.3f}"
    )


def _behind(view: View, train: np.ndarray, rollout: np.ndarray) -> tuple[int, np.ndarray, str] | None:
    """The position behind which the two sides are unlike, the tokens there, and the evidence; None if there is none."""
    edges = np.unique(np.quantile(view.position, np.linspace(0, 1, 17)[1:-1]).astype(np.int64))
    parts = np.searchsorted(edges, view.position, side="right")
    alike = [_correlation(train[parts == part], rollout[parts == part]) > _ALIKE for part in range(len(edges) + 1)]
    first = alike.index(False) if False in alike else 0
    if first < 2 or any(alike[first:]):
        return None
    tokens = parts >= first
    place = int(edges[first - 1])
    return (
        place,
        tokens,
        (
            f"up to position {place} the log-probs correlate by {_correlation(train[~tokens], rollout[~tokens]):.3f}, "
            f"behind it by {_correlation(train[tokens], rollout[tokens]):.3f}"
        ),
    )
