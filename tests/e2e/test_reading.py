"""A tracker's line is read as a whole, however it came into the log."""

from __future__ import annotations

import pytest

from e2e import reading

LINE = " - ".join(["step:4", *(f"metric/{number}:0.{number}5" for number in range(1, 31)), "last:np.float64(2.5)"])
WHO = "\x1b[36m(TaskRunnerV1 pid=4628)\x1b[0m "
BETWEEN = "2026-11-30 20:19:11,939 - WARNING - transfer_queue.utils.common - target_num_threads 8: too many"
WANT = {f"metric/{number}": float(f"0.{number}5") for number in range(1, 31)} | {"last": 2.5}


@pytest.mark.parametrize("cut", [len(LINE), *range(260, 280)])
def test_a_line_that_was_written_in_two_pieces(cut: int) -> None:
    """Wherever it was cut, with a line of the same process and one of another between the pieces."""
    log = "\n".join([WHO + LINE[:cut], WHO + BETWEEN, f"(Other pid=1) {LINE}"[:20], WHO + LINE[cut:], WHO + BETWEEN])
    assert reading.steps(log) == {4: WANT}


def test_lines_of_several_steps_and_processes() -> None:
    other = LINE.replace("step:4", "step:5").replace("metric/1:0.15", "metric/1:7")
    log = "\n".join([WHO + LINE, "(Other pid=1) " + other, "step:1 - a sentence that mentions a step"])
    assert reading.steps(log) == {4: WANT, 5: WANT | {"metric/1": 7.0}}
