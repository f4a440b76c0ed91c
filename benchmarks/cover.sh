#!/usr/bin/env bash
# cover and resize against controls: ablation, other tasks, questions, re-identification, and plans at equal measured time (about
# an hour on one core). With three more arguments also on a real CLIP: its folder, the folder of a webdataset, a classifier.
#   benchmarks/cover.sh [CLIP_FOLDER PHOTOS CLASSIFIER]
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
out=benchmarks/results
eval=(.venv/bin/tokensieve eval --num_workers 0)
if [ $# -eq 3 ]; then
  clip=(--model "$1" --model_type hf --dataset wds/photos --dataset_root "$2" --load_clfs "$3")
  .venv/bin/python benchmarks/ablation.py "${clip[@]}" --output $out/ablation_clip.json
fi
.venv/bin/python benchmarks/ablation.py --split val --limit 800 --output $out/ablation_val.json
for place in 2 6; do
  .venv/bin/python benchmarks/ablation.py --split val --limit 480 --place $place --keep 32 16 --norms 0 2 \
    --output $out/ablation_place$place.json
done
.venv/bin/python benchmarks/ablation.py --limit 800 --keep 60 32 16 --norms 0 2 --output $out/ablation_test.json

tasks=(.venv/bin/python benchmarks/ablation_tasks.py --num_workers 0 --norms 0 2)
"${tasks[@]}" --place 4 --metric acc1 --dataset embedded-heldout --limit 1000 --output $out/ablation_heldout.json
"${tasks[@]}" --place 4 --metric image_retrieval_recall@5 --dataset embedded-captions --limit 1000 --output $out/ablation_retrieval.json
"${tasks[@]}" --place 4 --metric lp_acc1 --task linear_probe --fewshot_k 8 --limit 1000 --feature_root "$(mktemp -d)" \
  --output $out/ablation_probe.json
"${tasks[@]}" --place 4 --metric CIDEr --task captioning --dataset embedded-captions --limit 150 --model sieve-coca-8 \
  --pretrained captions-v1 --output $out/ablation_captions.json
"${tasks[@]}" --place out llm.0 llm.3 --metric vqa_score --task vqa --dataset embedded-questions --limit 400 --max_new_tokens 4 \
  --batch_size 50 --output $out/ablation_vqa.json
"${tasks[@]}" --place 3 --keep 26 13 --metric mAP --task reid --model sieve-reid-6 --modalities RGB,NI,TI \
  --output $out/ablation_reid.json

questions=()
for place in out llm.0 llm.3; do
  questions+=("cover@$place:40" "cover@$place:16" "cover@$place:16(norm=0)" "cover@$place:16(sizes=no)" "grid@$place:16(rest=merge)"
    "random@$place:16(rest=merge)")
done
"${eval[@]}" --task vqa --dataset embedded-questions --limit 600 --max_new_tokens 4 --batch_size 50 --plan none \
  --compare "${questions[@]}" --output "$out/cover-vqa_{plan}.json"
"${eval[@]}" --task reid --model sieve-reid-6 --plan none --compare cover@3:26 "cover@3:26(norm=0)" cover@2:42 \
  "grid@3:26(rest=merge)" "random@3:26(rest=merge)" "resize(scale=0.75)" --output "$out/cover-reid_{plan}.json"
"${eval[@]}" --task vqa --dataset embedded-questions --limit 600 --max_new_tokens 4 --batch_size 50 --plan none --compare 2x 3x \
  "resize(scale=0.857)" "resize(scale=0.714)" cover:52 "cover@out:40(sizes=no)" --output "$out/mixes-vqa_{plan}.json"
"${eval[@]}" --task reid --model sieve-reid-6 --modalities RGB,NI,TI --plan none --compare 2x 3x "resize(scale=0.857)" \
  --output "$out/mixes-reid_{plan}.json"
.venv/bin/python benchmarks/cover_speed.py --output $out/cover_speed.json

.venv/bin/python benchmarks/equal_time.py --limit 2000 --batch_size 32 --output $out/equal_time_embedded.json --plans cover@2:56 \
  "resize(size=104) + cover@2:56" cover:32 cover:16 2x "resize(size=88)" "resize(size=80)" tome:-16 tome:-20 \
  "anchor(k=10,m=50,alpha=0.5)" "anchor:60(rest=merge)" "anchor@2:56(k=56,rest=merge,norm=2)" random:60 grid:60 random@2:56 \
  "grid@2:56(rest=merge)"
if [ $# -eq 3 ]; then
  plans=()
  for size in 192 160 144 128; do plans+=("resize(size=$size)" "resize(size=$size,antialias=yes)"); done
  .venv/bin/python benchmarks/equal_time.py "${clip[@]}" --every 4 --output $out/antialias_clip.json --plans "${plans[@]}"
  .venv/bin/python benchmarks/equal_time.py "${clip[@]}" --output $out/equal_time_clip.json --plans 2x 3x \
    "resize(size=192) + cover@7:40" "resize(size=192) + cover@8:24" "resize(size=176) + cover@7:64" \
    "resize(size=160) + cover@7:40" "resize(size=160)" "resize(size=144)" "resize(size=128)" tome:-16 tome:-20 cover:32 \
    "anchor(k=10,m=50,alpha=0.5)" "anchor:60(rest=merge)" random:60 grid:60
fi
