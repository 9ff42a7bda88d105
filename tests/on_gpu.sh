#!/usr/bin/env bash
# Runs all tests marked `gpu`, on a machine with a GPU: bash tests/on_gpu.sh [PROCESSES] [SECONDS]
# Building the kernels takes longer than running them, so many processes share the tests. The last line counts the
# results. A process that exceeds its time limit is printed, and its failures are in its log.
set -u
processes=${1:-12} limit=${2:-400} logs=$(mktemp -d)
export PYTHONPATH=src CUBLAS_WORKSPACE_CONFIG=:4096:8 COLUMNS=300  # wide enough for the reason of a failure
options=(-m gpu -q -o "addopts=--import-mode=importlib" -p no:cacheprovider --tb=short)
python3 -m pytest "${options[@]}" --collect-only tests | grep ^tests.*:: > "$logs/all"
echo "$(wc -l < "$logs/all") tests"
echo "logs in $logs" >&2
for ((i = 0; i < processes; i++)); do
  awk -v n="$processes" -v i="$i" 'NR % n == i' "$logs/all" > "$logs/tests.$i"
  (timeout "$limit" python3 -m pytest "${options[@]}" "@$logs/tests.$i" > "$logs/$i.log" 2>&1
   [ $? -eq 124 ] && echo "process $i ran out of its $limit s") &
done
wait
grep -hE "^(FAILED|ERROR)" "$logs"/*.log
counted() { grep -hoE "[0-9]+ $1" "$logs"/*.log | awk '{ n += $1 } END { print n + 0 }'; }
echo "$(counted passed) passed, $(counted failed) failed, $(counted skipped) skipped, $(counted xfailed) xfailed" \
     "of $(wc -l < "$logs/all")"
