#!/usr/bin/env bash
# The leaderboard: every method on every task, then its tables and its page. Resumable: rows that are there are not made again.
#   benchmarks/leaderboard.sh [--quick] [--limit N] ...         the embedded models
#   benchmarks/leaderboard.sh --real-clip CLIP PHOTOS CLASSIFIER   a real CLIP, see docs/leaderboard.md
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
.venv/bin/python benchmarks/leaderboard.py "$@"
.venv/bin/python benchmarks/tables.py
.venv/bin/tokensieve leaderboard page --output "${LEADERBOARD_PAGE:-leaderboard.html}"
