#!/usr/bin/env bash
# SDTPS re-identification on the embedded people: trains the baseline, SDTPS and the controls with three seeds each, two at a
# time, evaluates each on the test identities, and the baselines also with untrained merges; then trains merges inside the
# backbone from each baseline, and measures times. FOLDER keeps the trainings (about two hours on two cores). Run the script again
# after an interruption: it resumes.
#   benchmarks/reid.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
work=${1:?a folder for the trainings}
out=benchmarks/results
.venv/bin/python benchmarks/reid_variants.py "$work"
one() {
  local name; name=$(basename "$1" .yml)
  [ -e "$2/$name/card.json" ] || .venv/bin/tokensieve train "$1" --resume --quiet
  OMP_NUM_THREADS=1 .venv/bin/tokensieve eval --task reid --model "$2/$name" --dataset embedded-reid --modalities RGB,NI,TI \
    --plan "$(.venv/bin/python -c 'import json, sys; print(json.load(open(sys.argv[1]))["plan"])' "$2/$name/config.json")" \
    --num_workers 0 --skip_existing --quiet --output "$2/$name/test.json"
  sed "s#$2/##g" "$(ls -t "$2/$name"/test*.json | head -n 1)" > "$3_$name.json" # without local paths
}
export -f one
for seed in 1 2 3; do ls "$work"/*-"$seed".yml; done | xargs -P 2 -I {} bash -c "one {} '$work' '$out/reid'"
for seed in 1 2 3; do ls "$work"/merge/*-"$seed".yml; done | xargs -P 2 -I {} bash -c "one {} '$work' '$out/reid-merge'"
for seed in 1 2 3; do
  cp "$out/reid_baseline-$seed.json" "$out/reid-merge_baseline-$seed.json"
  for cut in half:cover@3:26 third:cover@2:40; do
    name=cover-${cut%%:*}-untrained-$seed
    OMP_NUM_THREADS=1 .venv/bin/tokensieve eval --task reid --model "$work/baseline-$seed" --dataset embedded-reid \
      --modalities RGB,NI,TI --plan "${cut#*:}" --num_workers 0 --skip_existing --quiet --output "$work/$name.json"
    sed "s#$work/##g" "$(ls -t "$work/$name"*.json | head -n 1)" > "$out/reid-merge_$name.json"
  done
done
.venv/bin/python benchmarks/reid_time.py "$out/time_reid.json"
