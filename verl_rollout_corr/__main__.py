"""`python -m verl_rollout_corr` is the command `verl-rollout-corr`."""

from verl_rollout_corr.cli.main import main

if __name__ == "__main__":
    main()
