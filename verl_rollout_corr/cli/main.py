"""The command line: verbs, and how errors become one line on stderr and an exit code.

Exit codes: 0, all is well; 1, the answer is "no" (a run that would be refused, a dump with a cause to act on); 2, the
question could not be answered (a file that cannot be read, a word that is not known).
"""

from __future__ import annotations

import sys

try:
    import typer
except ImportError:  # pragma: no cover - the console script is there in every installation
    sys.exit("verl-rollout-corr: the command line needs typer and rich. Install verl-rollout-corr[report].")

from verl_rollout_corr.cli import check, diagnose, explain, translate, whatif
from verl_rollout_corr.cli.output import plain
from verl_rollout_corr.errors import RolloutCorrError

app = typer.Typer(
    name="verl-rollout-corr",
    help="Rollout correction for RL of language models: check a run, explain a preset, find the cause of a mismatch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
check.register(app)
explain.register(app)
translate.register(app)
diagnose.register(app)
whatif.register(app)


def main() -> None:
    """The entry point of the console script."""
    try:
        # By `python -m`, too: completion for a shell is that of the program.
        app(prog_name="verl-rollout-corr")
    except RolloutCorrError as error:
        # Names of files and words of a dump are in it.
        sys.stderr.write(f"verl-rollout-corr: {plain(str(error))}\n")
        sys.exit(2)
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. Python would report that once more when it flushes.
        sys.stderr.close()
        sys.exit(0)
