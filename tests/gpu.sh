#!/usr/bin/env bash
# Everything that needs a GPU, from binaries that were built elsewhere: the machine with the GPU needs
# the driver and the CUDA libraries, no Rust.
#
#   tests/gpu.sh build DIR [PART…]  where Rust and a CUDA toolkit are: builds and collects the binaries;
#                                   PART is core, candle, burn or linked, else all
#   tests/gpu.sh run DIR [PART…]    where the GPU is: runs them; PART is tests, diffuse, bench, weights, zoo,
#                                   burn or memcheck, else all
#
# Logs go to ${LOGS:-DIR/logs}. A short table comes last; the exit code is not 0 if anything failed.
set -uo pipefail

usage() { sed -n '2,11p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
verb=$1; dir=$2; shift 2

# Test binaries of one package, as cargo names them: "name path" a line.
built() {
  cargo test --no-run --message-format=json "$@" |
    python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message.get("profile", {}).get("test"):
        print(message["target"]["name"], message["executable"])'
}

# Every part is a build of its own: Candle links the driver and the crate alone loads it; Candle's way of
# linking it and cubecl's do not go together.
collect() {
  local prefix=$1; shift
  built "$@" | while read -r name path; do
    cp "$path" "$dir/$prefix$name"; strip "$dir/$prefix$name"
  done
}

build_core() {
  collect core- -p memory-compiler --features cuda \
    --test device_cuda --test hook_cuda --test robust_cuda --test scenarios
  cargo bench --no-run --message-format=json -p memory-compiler --features cuda --bench gpu |
    python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["target"]["name"] == "gpu":
        print(message["executable"])' | while read -r path; do
      cp "$path" "$dir/bench-gpu"; strip "$dir/bench-gpu"
    done
}

# In one command, so that Candle's kernels are compiled once.
build_candle() {
  local build=(--release -p memory-compiler-candle -p memory-compiler-models
    --features memory-compiler-candle/cuda,memory-compiler-models/zoo)
  collect candle- "${build[@]}" --test cuda --test paged_cuda --test cuda_without_the_line
  cargo build "${build[@]}" --bin zoo --bin diffuse
  for name in zoo diffuse; do
    cp "${CARGO_TARGET_DIR:-target}/release/$name" "$dir/$name"; strip "$dir/$name"
  done
}

# Without a network: DOCS_RS=1, BURN="--features cubecl/cuda-cpp", and a linker that adds stubs of LLVM's symbols.
build_burn() {
  local build=(--release -p memory-compiler-burn -p memory-compiler-models ${BURN:-}
    --features memory-compiler-burn/cuda,memory-compiler-models/burn-cuda,burn/autotune)
  collect burn- "${build[@]}" --test cuda --test cuda_too_late
  cargo build "${build[@]}" --bin burn-zoo --bin diffuse
  cp "${CARGO_TARGET_DIR:-target}/release/burn-zoo" "$dir/zoo-burn"; strip "$dir/zoo-burn"
  cp "${CARGO_TARGET_DIR:-target}/release/diffuse" "$dir/diffuse-burn"; strip "$dir/diffuse-burn"
  cargo build "${build[@]},burn/fusion" --bin burn-zoo
  cp "${CARGO_TARGET_DIR:-target}/release/burn-zoo" "$dir/zoo-burn-default"; strip "$dir/zoo-burn-default"
}

# The hook's effect where the linker, or the compiler, sees all code at once; and without the line.
build_linked() {
  local linked=${CARGO_TARGET_DIR:-target}/linked profile
  for profile in dev release thin fat; do
    cargo build --manifest-path tests/linked/Cargo.toml --target-dir "$linked" --profile $profile
    cp "$linked/${profile/dev/debug}/linked" "$dir/linked-$profile"
  done
  cargo build --manifest-path tests/linked/Cargo.toml --target-dir "$linked/forgotten" --features forgotten
  cp "$linked/forgotten/debug/linked" "$dir/linked-forgotten"
}

rows=()
failed=0
row() { rows+=("$(printf '%-44s %-7s %5ss  %s' "$1" "$2" "$3" "$4")"); [ "$2" != FAILED ] || failed=1; }

# try NAME COMMAND…: runs, logs, and adds a row.
try() {
  local name=$1 log began code state=ok; shift
  log=$logs/$(tr -c 'A-Za-z0-9\n' '_' <<<"$name").log
  began=$SECONDS
  timeout "${LIMIT:-300}" "$@" >"$log" 2>&1; code=$?
  local said; said=$(grep -aE '^test result|ERROR SUMMARY' "$log" | tail -1 | cut -c1-38)
  local skipped; skipped=$(grep -ac SKIPPED "$log")
  [ "$skipped" = 0 ] || said="$said $skipped skipped"
  if [ $code != 0 ]; then state=FAILED; said="code $code $said"; echo "== $name"; tail -n 40 "$log"; fi
  row "$name" $state $((SECONDS - began)) "$said"
}

tests() {
  for binary in "$dir"/core-{device,hook,robust}_cuda; do try "${binary##*/}" "$binary"; done
  for binary in "$dir"/candle-* "$dir"/burn-*; do
    [ ! -e "$binary" ] || try "${binary##*/}" "$binary" --test-threads=1 --nocapture
  done
  for binary in "$dir"/linked-*; do
    [ ! -e "$binary" ] || try "${binary##*/}" "$binary"
  done
  # The table of scenarios with the GPU in the place of `Host`.
  try "scenarios on the GPU" env MEMORY_COMPILER_DEVICE=cuda "$dir/core-scenarios" --test-threads=4
}

# Every model, sampler and mode: the images are the same, bit for bit, with and without the compiler.
diffuse() {
  local model sampler mode
  for model in unet dit; do
    for sampler in euler ddim dpmpp-2m; do
      for mode in flip-flop batched; do
        try "diffuse $model $sampler $mode" "$dir/diffuse" --device cuda --model $model --strict \
          --sampler $sampler --cfg-mode $mode --compare --out "$logs/$model-$sampler-$mode.png"
      done
    done
  done
}

bench() {
  try "bench through the hook" "$dir/bench-gpu" --bench
  cat "$logs/bench_through_the_hook.log"
}

memcheck() {
  local checker; checker=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  for name in a_recorded_and_a_replayed a_tensor_that_another_thread; do
    try "memcheck $name" "$checker" --tool memcheck --error-exitcode 9 "$dir/candle-cuda" "$name"
  done
  # Parameters of a kernel are counted by asking for them until the driver says that there is no such one.
  try "memcheck paged weights" "$checker" --tool memcheck --report-api-errors no --error-exitcode 9 \
    "$dir/candle-paged_cuda" --test-threads=1
  try "memcheck the device" "$checker" --tool memcheck --error-exitcode 9 \
    "$dir/core-device_cuda" a_compiler_replays
}

# model limits further: weights that are not all on the GPU, against all of them there.
weights() {
  local table=$logs/weights.txt; : >"$table"
  while read -r model limits more; do
    local began=$SECONDS state=ok code
    # shellcheck disable=SC2086
    CUDA_VISIBLE_DEVICES=0 timeout "${LIMIT:-300}" "$dir/zoo" --model "$model" --weight-budget "$limits" \
      --steps 6 $more >>"$table" 2>&1; code=$?
    [ $code = 0 ] || state=FAILED
    row "weights of $model, $limits" $state $((SECONDS - began)) "code $code"
  done <<<"${WEIGHTS:-sd15 100%,60%,30%,10% --then vae
sd3 100%,60%,30%,10%
flux 24GiB,16GiB,8GiB,4GiB}"
  cat "$table"
}

# model size batch steps rounds: the table of the issue. With several GPUs only the first is shown.
zoo() {
  local table=$logs/zoo.txt bare= state code; : >"$table"
  while read -r model size batch steps rounds; do
    local began=$SECONDS state=ok code
    CUDA_VISIBLE_DEVICES=0 timeout "${LIMIT:-300}" "$dir/zoo" --compare --model "$model" --size "$size" \
      --batch "$batch" --steps "$steps" --rounds "$rounds" $bare >>"$table" 2>&1; code=$?
    [ $code = 0 ] || state=FAILED
    row "zoo $model $size b$batch" $state $((SECONDS - began)) "code $code"
    bare=--bare
  done <<<"${ZOO:-sd15 512 2 16 3
sd15 640x448 2 16 3
sd15 256 1 16 8
sdxl 768 1 8 3
vae 512 1 8 3
sdxl 1024 2 4 2
sd3 1024 2 3 2
sd35 1024 2 3 2
flux 1024 1 3 2
z-image 1024 1 3 2}"
  cat "$table"
}

# Burn's networks, with fusion and without; tuning compiles hundreds of kernels, which takes minutes.
burn() {
  local table=$logs/burn.txt began=$SECONDS state=ok code model
  CUDA_VISIBLE_DEVICES=0 timeout "${BURN_LIMIT:-1500}" "$dir/zoo-burn" --beside "$dir/zoo-burn-default" \
    >"$table" 2>&1; code=$?
  [ $code = 0 ] || state=FAILED
  row "zoo of Burn" $state $((SECONDS - began)) "code $code"
  cat "$table"
  for model in unet dit; do
    LIMIT=${BURN_LIMIT:-1500} try "diffuse $model with Burn" "$dir/diffuse-burn" --framework burn --device cuda \
      --model $model --compare --out "$logs/burn-$model.png"
  done
}

case $verb in
  build)
    set -e; mkdir -p "$dir"
    for part in "${@:-all}"; do
      case $part in
        core|candle|burn|linked) build_$part ;;
        all) build_core; build_candle; build_burn; build_linked ;;
        *) usage ;;
      esac
    done
    ls -l "$dir" ;;
  run)
    logs=${LOGS:-$dir/logs}; mkdir -p "$logs"
    for part in "${@:-all}"; do
      case $part in
        tests|diffuse|bench|memcheck|weights|zoo|burn) $part ;;
        all) tests; diffuse; bench; zoo; weights; burn; memcheck ;;
        *) usage ;;
      esac
    done
    echo; printf '%s\n' "${rows[@]}"
    [ $failed = 0 ] && echo "all of it passed" || echo "something FAILED"
    exit $failed ;;
  *) usage ;;
esac
