"""Detectors of a sampler that changes the distribution: temperature, truncation, a vocabulary mask, penalties.

They rest on three facts, for tokens a drawn from mu and l = log pi - log mu:

- E[r] = 1 in every context in which mu can sample whatever pi can. Where mu leaves tokens out, E[r] = S, the
  probability under pi of those that it keeps.
- If mu is proportional to pi^k (temperature 1/k), log mu - k log pi is constant within a context. Rows of a group that
  share their first tokens give k exactly, from the first tokens that differ, whatever else is constant there.
- Because E[r - 1] = 0 given the context, r - 1 is an instrumental variable: from all tokens, where mu leaves none out,
  k = cov(r - 1, log mu) / cov(r - 1, log pi).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_rollout_corr.diagnosis.explained import finding, not_found
from verl_rollout_corr.diagnosis.records import Checked, Finding
from verl_rollout_corr.diagnosis.view import View, typical

LEAST_SHARE = 0.04
"""A cause that explains a smaller share of the mean square of l is not reported."""
_SLOWEST = 0.25
"""A temperature above its inverse, or a k below it, is not one that anybody sets: another fault looks like that."""
_BENT = 0.5
"""What a temperature leaves of l within contexts is noise, and not this large."""
_NOISE = 0.003
"""The mean square of l that BF16 makes: the bias of the instrument is this over the covariance that it divides by."""
KNOTS = 6
"""Bends of the curve over the log-prob."""


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error; infinite where the data have none."""

    value: float
    error: float = float("inf")


def within_contexts(view: View) -> tuple[Estimate, float, float]:
    """K from different tokens in a shared context, the share of the mean square within contexts that it explains, and
    the typical size of what it leaves there.
    """
    context = view.context
    if context is None or not (context >= 0).any():
        return Estimate(1.0), 0.0, 0.0
    # A token that several rows drew in one context is one observation: its noise is the same in each.
    pairs = np.stack([context, view.ids if view.ids is not None else np.zeros_like(context)])
    _, once = np.unique(pairs, axis=1, return_index=True)
    chosen = once[context[once] >= 0]
    _, inverse, counts = np.unique(context[chosen], return_inverse=True, return_counts=True)

    def about_mean(values: np.ndarray) -> np.ndarray:
        part = values[chosen]
        return part - (np.bincount(inverse, part) / counts)[inverse]

    ratio, middle = about_mean(view.log_ratio), about_mean(view.middle)
    apart = middle != 0
    ratio, middle = ratio[apart], middle[apart]
    if len(middle) < 12:
        return Estimate(1.0), 0.0, 0.0
    weights = np.ones_like(middle)
    slope = 0.0
    for _ in range(8):  # Huber's weights: the noise of BF16 has heavy tails
        slope = float((weights * ratio * middle).sum() / (weights * middle**2).sum())
        residual = ratio - slope * middle
        scale = 1.5 * np.median(np.abs(residual)) / 0.6745 + 1e-12
        weights = np.minimum(1.0, scale / np.maximum(np.abs(residual), 1e-300))
    residual = ratio - slope * middle
    # Twice the plain error: the parts of one context are not independent.
    error = 1.5 * float(np.sqrt((weights**2 * residual**2 * middle**2).sum()) / (weights * middle**2).sum())
    explained = 1 - float((weights * residual**2).sum() / max((weights * ratio**2).sum(), 1e-300))
    return Estimate((2 - slope) / (2 + slope), error), explained, typical(residual)


def by_instrument(view: View) -> Estimate:
    """K from all tokens; valid where mu leaves no token out."""
    gap = view.ratio - 1
    gap = gap - gap.mean()
    strength = float((gap * view.train).sum())
    if abs(strength) < 1e-12:
        return Estimate(1.0)
    k = float((gap * view.rollout).sum() / strength)
    residual = k * view.train - view.rollout
    residual -= residual.mean()
    return Estimate(k, float(np.sqrt((gap**2 * residual**2).sum()) / abs(strength)))


def hinges(values: np.ndarray) -> np.ndarray:
    """(N, KNOTS + 2): a constant, the value, and a bend at each of its quantiles."""
    knots = np.unique(np.quantile(values, np.linspace(0, 1, KNOTS + 2)[1:-1]))
    return np.stack([np.ones_like(values), values, *[np.maximum(values - knot, 0) for knot in knots]], axis=1)


def winsorised(values: np.ndarray) -> np.ndarray:
    """Cuts the values at the quantile .99 of their size."""
    limit = np.quantile(np.abs(values), 0.99)
    return values.clip(-limit, limit)


def residuals(design: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The residuals of a least-squares fit."""
    coefficients, *_ = np.linalg.lstsq(design, values, rcond=None)
    return values - design @ coefficients


@dataclass(frozen=True)
class Sampler:
    """What the four detectors measured on one view."""

    k: Estimate
    by_middle: float  # share of the mean square of r - 1 that a curve over the log-prob explains beyond its mean
    sign_changes: bool  # r - 1 has one sign for likely and the other for unlikely tokens, both surely
    mean_ratio: Estimate
    one_sided: float  # 1 - twice the positive half of sum l^2: 1 if l is never positive, 0 if it is symmetric
    earlier: float  # share that having come before explains beyond that curve
    earlier_effect: Estimate  # mean of r - 1 of tokens that came before against those that did not
    per_occurrence: float


def measure(view: View) -> Sampler:
    """Measures a view of at least a few hundred tokens."""
    gap = winsorised(view.ratio - 1)
    square = float((gap**2).mean())
    curve = hinges(view.middle)
    rest = residuals(curve, gap)
    mean = Estimate(float(view.ratio.mean()), float(view.ratio.std() / np.sqrt(len(view))))
    positive = float((view.log_ratio[view.log_ratio > 0] ** 2).sum())
    seen, effect, each = _earlier(view, gap, curve, rest)
    return Sampler(
        k=_temperature(view, mean),
        by_middle=float((gap.var() - rest.var()) / square) if square else 0.0,
        sign_changes=_sign_changes(view, gap),
        mean_ratio=mean,
        one_sided=1 - 2 * positive / view.energy if view.energy else 0.0,
        earlier=seen / square if square else 0.0,
        earlier_effect=effect,
        per_occurrence=each,
    )


def _temperature(view: View, mean: Estimate) -> Estimate:
    pairs, _, _ = within_contexts(view)
    # The instrument is biased by noise where the effect is small: noise is then as large as what it looks for.
    if pairs.error < 0.01 or abs(mean.value - 1) > max(4 * mean.error, 0.01):
        return pairs
    instrument = by_instrument(view)
    if abs(instrument.value - 1) < 0.15 or not 0 < instrument.error <= 0.05:
        return pairs
    weights = np.array([pairs.error**-2.0, instrument.error**-2.0])
    value = float((weights * [pairs.value, instrument.value]).sum() / weights.sum())
    return Estimate(value, float(weights.sum() ** -0.5))


def _sign_changes(view: View, gap: np.ndarray) -> bool:
    edges = np.quantile(view.middle, [0.25, 0.5])
    scores = []
    for part in (view.middle <= edges[0], view.middle > edges[1]):
        values = gap[part]
        if not len(values):  # every log-prob is the same
            return False
        spread = values.std()
        scores.append(values.mean() / spread * np.sqrt(len(values)) if spread else 0.0)
    return scores[0] * scores[1] < 0 and min(map(abs, scores)) > 4


def _earlier(view: View, gap: np.ndarray, curve: np.ndarray, rest: np.ndarray) -> tuple[float, Estimate, float]:
    earlier = view.earlier
    if earlier is None or not 0.01 < (earlier > 0).mean() < 0.99:
        return 0.0, Estimate(0.0), 0.0
    came, count = (earlier > 0).astype(float), np.log1p(earlier)
    after = residuals(np.column_stack([curve, came, count]), gap)
    # The effect is that of the one that says more: a penalty counts, or it does not.
    effects = [_effect(residuals(curve, column), rest) for column in (came, count)]
    effect = max(effects, key=lambda one: abs(one.value / one.error) if one.error else 0.0)
    means = np.bincount(earlier.clip(max=3), gap, 4) / np.maximum(np.bincount(earlier.clip(max=3), minlength=4), 1)
    return float(rest.var() - after.var()), effect, float(means[3] - means[1])


def _effect(column: np.ndarray, rest: np.ndarray) -> Estimate:
    """The slope of `rest` over a column, with its standard error whatever the variances are."""
    size = float((column**2).sum())
    if not size:
        return Estimate(0.0)
    slope = float((column * rest).sum() / size)
    return Estimate(slope, float(np.sqrt((column**2 * (rest - slope * column) ** 2).sum()) / size))


def detect(view: View) -> tuple[list[Finding], list[Checked]]:
    """Temperature, truncation or vocabulary mask, and penalties; or the evidence against each."""
    if len(view) < 200:
        return [], []
    seen = measure(view)
    found: list[Finding] = []
    against: list[Checked] = []
    for one in (_find_penalty(seen), _find_temperature(view, seen), _find_truncation(view, seen)):
        (found if isinstance(one, Finding) else against).append(one)  # type: ignore[arg-type]
    return found, against


def _find_penalty(seen: Sampler) -> Finding | Checked:
    effect = seen.earlier_effect
    score = effect.value / effect.error if effect.error else 0.0
    said = (
        f"tokens that came before have a ratio {effect.value:+.4f} from that of others as likely "
        f"({abs(score):.0f} standard errors), {seen.earlier:.1%} of the mean square"
    )
    if seen.earlier < 0.03 or abs(score) < 8:
        return not_found("penalty", said)
    kind = "it grows with the count" if abs(seen.per_occurrence) > 0.5 * abs(effect.value) else "once for any count"
    values = {"effect": effect.value, "per_occurrence": seen.per_occurrence}
    return finding("penalty", seen.earlier, 0.5 + min(abs(score), 40) / 80, (said, kind), values)


def _find_temperature(view: View, seen: Sampler) -> Finding | Checked:
    k, (pairs, explained, left) = seen.k, within_contexts(view)
    surely = abs(pairs.value - 1) > 5 * pairs.error and explained > 0.1
    # A penalty bends the curve too, through the likelihood of what came before: then only shared contexts tell.
    curved = seen.sign_changes and seen.by_middle > LEAST_SHARE and seen.earlier < 0.5 * seen.by_middle
    said = f"log mu moves {k.value:.3f} (± {k.error:.3f}) as fast as log pi within a context"
    if not (surely or curved) or not _SLOWEST < k.value < 1 / _SLOWEST:
        return not_found("temperature", said)
    if left > _BENT and explained < 0.9:
        return not_found("temperature", f"{said}, but differences within a context are off by {left:.2g} besides")
    if k.error == float("inf"):
        k = _rough(view, seen.mean_ratio)
        said = f"log mu moves about {k.value:.2f} as fast as log pi (no two rows share a context: a rough value)"
    share = max(seen.by_middle, explained if surely else 0.0)
    part = _rows_of(view)
    also: tuple[str, ...] = ()
    rows = 1.0
    if part is not None:
        apart = view.where(part[view.row])
        again = _temperature(apart, Estimate(float(apart.ratio.mean()), float(apart.ratio.std() / np.sqrt(len(apart)))))
        k = again if again.error < float("inf") else _rough(apart, seen.mean_ratio)
        rows = float(part.sum() / len(np.unique(view.row)))
        also = (f"that is so in {rows:.0%} of the rows; in the others both sides have one temperature",)
    tau, error = 1 / k.value, k.error / k.value**2
    evidence = (
        said,
        f"the engine samples at {tau:.3f} (± {error:.3f}) of the trainer's temperature",
        *also,
        f"likely and unlikely tokens have ratios on opposite sides of 1 ({seen.by_middle:.0%} of the mean square)",
    )
    values = {"temperature": tau, "error": error, "rows": rows}
    return finding("temperature", share, 0.99 if surely else 0.9, evidence, values)


def _rough(view: View, mean: Estimate) -> Estimate:
    """K if no two rows share a context: by the instrument, with what noise of BF16 may add to it. Where mu leaves
    tokens out it is the slope of the principal axis, which is nearer to 1 than k, as contexts differ.
    """
    if abs(mean.value - 1) < max(4 * mean.error, 0.01):
        found = by_instrument(view)
        strength = abs(float(np.cov(view.ratio, view.train)[0, 1]))
        return Estimate(found.value, float(np.hypot(found.error, _NOISE / max(strength, 1e-12))))
    covariance = np.cov(view.train, view.rollout)
    difference = covariance[1, 1] - covariance[0, 0]
    slope = float((difference + np.sqrt(difference**2 + 4 * covariance[0, 1] ** 2)) / (2 * covariance[0, 1]))
    return Estimate(slope, 3 * abs(slope - 1) + 0.01)


def _rows_of(view: View) -> np.ndarray | None:
    """(rows,) the rows with the temperature, if the others, at least a tenth, have none: by each row's slope of l."""
    count = np.bincount(view.row, minlength=len(view.sample.batch))

    def mean(values: np.ndarray) -> np.ndarray:
        return np.bincount(view.row, values, len(count)) / np.maximum(count, 1)

    x, y = mean(view.middle), mean(view.log_ratio)
    spread = mean(view.middle**2) - x**2
    slope = (mean(view.middle * view.log_ratio) - x * y) / np.maximum(spread, 1e-9)
    enough = np.flatnonzero((count >= 12) & (spread > 0.05))
    if len(enough) < 20:
        return None
    ordered = np.sort(slope[enough])
    place, gap = split(ordered)
    parts = ordered[: place + 1], ordered[place + 1 :]
    none, some = sorted(parts, key=lambda part: abs(float(np.median(part))))
    within = float(np.sqrt((none.var() * len(none) + some.var() * len(some)) / len(ordered)))
    quiet = abs(float(np.median(none))) < 0.1 * abs(float(np.median(some))) and none.std() < 0.4 * gap
    if min(len(none), len(some)) < 0.1 * len(ordered) or gap < 2.5 * within or not quiet:
        return None
    middle = (ordered[place] + ordered[place + 1]) / 2
    above = bool(np.median(some) > middle)
    return (slope > middle) == above


def split(ordered: np.ndarray) -> tuple[int, float]:
    """The best split of sorted values into two groups (least squares), and how far apart the means of the two are."""
    total, count = np.cumsum(ordered), np.arange(1, len(ordered) + 1)
    left = total[:-1] / count[:-1]
    right = (total[-1] - total[:-1]) / (len(ordered) - count[:-1])
    place = int(np.argmax(count[:-1] * (len(ordered) - count[:-1]) * (right - left) ** 2))
    return place, float(right[place] - left[place])


def _find_truncation(view: View, seen: Sampler) -> Finding | Checked:
    mean = seen.mean_ratio
    lost = 1 - mean.value
    score = lost / mean.error if mean.error else 0.0
    said = f"the mean ratio is {mean.value:.4f} (± {mean.error:.4f}): the mass S of the trainer that the engine keeps"
    heavy = seen.k.value > 1 + 5 * seen.k.error and lost < 0.02  # a rare token of large r may not have been sampled
    if score < 6 or seen.one_sided < 0.2 or heavy or lost < 1e-4:
        return not_found("truncation", said)
    half = f"l is negative for {(view.log_ratio < 0).mean():.0%} of the tokens"
    values = {"kept_mass": mean.value, "error": mean.error}
    share = max(seen.one_sided, lost**2 / max(float((view.ratio - 1).var() + lost**2), 1e-300))
    level = lost**2 / max(float((winsorised(view.ratio - 1) ** 2).mean()), 1e-300)
    vocabulary, why = _is_vocabulary(view, constant=seen.by_middle < 0.15 * level)
    cause = "vocabulary" if vocabulary else "truncation"
    return finding(cause, share, 0.95, (said, half, *why), values)


def _is_vocabulary(view: View, *, constant: bool) -> tuple[bool, tuple[str, ...]]:
    """Whether ids are left out whatever their probability. `constant`: likely tokens lose as much as others."""
    sampling, tokenizer = view.sample.facts.sampling, view.sample.facts.tokenizer
    told = {name: sampling.get(name) for name in ("top_p", "top_k", "min_p")}
    told = {name: value for name, value in told.items() if isinstance(value, int | float) and value not in (-1, 0, 1)}
    if told:
        return False, (f"the run sampled with {', '.join(f'{name}={value:g}' for name, value in told.items())}",)
    model_size, tokenizer_size = tokenizer.get("model_size"), tokenizer.get("tokenizer_size")
    if isinstance(model_size, int) and isinstance(tokenizer_size, int) and model_size > tokenizer_size:
        return True, (f"the model has {model_size} ids and the tokenizer {tokenizer_size}",)
    if (offset := _same_offset(view)) is not None:
        return True, (f"l is {offset:.4f} for tokens that the engine is certain of, and hardly varies among them",)
    # Precision does not make it: where the trainer leaves .002 to other tokens, they are some 6 nats behind, not 16.
    certain = float(((view.rollout == 0.0) & (view.train < -0.002)).mean())
    if certain > 0.002:
        return False, (f"{certain:.1%} of the tokens were the only ones kept: log mu is exactly 0.0",)
    if constant:
        return True, (f"l is as far off for likely and unlikely tokens: {np.median(view.log_ratio):.4f}",)
    # A truncation drops what is less likely than the sampled token: no more than the vocabulary can hold.
    dropped = -np.expm1(view.log_ratio)
    largest = int(view.ids.max()) + 1 if view.ids is not None else 0
    size = model_size if isinstance(model_size, int) else largest
    if size > 0:
        impossible = float(((dropped > 0.05) & (dropped > 1.3 * size * np.exp(view.train))).mean())
        if impossible > 1e-3:
            return True, (f"{impossible:.2%} of the tokens are less likely than what was left out",)
    return False, ("what was left out fits behind the sampled tokens",)


def _same_offset(view: View) -> float | None:
    """The mean of l of the tokens that the engine is certain of, if it is the same for all: what a truncation leaves
    out differs wherever one token is nearly certain. None if it varies, or if there is no such token.
    """
    values = view.log_ratio[view.rollout > -0.005]
    if len(values) < 30:
        return None
    mean = float(values.mean())
    return mean if mean < -4e-4 and float(values.std()) < 0.25 * -mean else None
