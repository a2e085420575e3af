#!/usr/bin/env bash
# PPO with a critic on a laptop: the steps of brorl_tiny.sh with another configuration. The critic starts as a copy of the
# warm-started model.
# Usage: [RUN=directory] [PROCESSES=2] bash examples/ppo_critic_tiny.sh [section.key=value ...]
set -euo pipefail
export RUN=${RUN:-runs/ppo_critic_tiny} CONFIG=examples/ppo_critic_tiny.toml
exec bash "$(dirname "$0")/brorl_tiny.sh" "$@"
