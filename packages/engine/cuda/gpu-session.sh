#!/bin/bash
# One session on a machine with a GPU, from a bare checkout: builds, checks and measures the CUDA backend, in the
# order of its worth, so that what is cut off is worth least. Needs nvcc, cmake and ninja (or make); python3 with torch for two of
# the stages; Node only where one is given. Says in one line what a stage lacks, and goes on.
#
#   gpu-session.sh [--emulated] [STAGE...]      default: all stages, 25 minutes in sum
#
#   build    the CUDA backend for this GPU; the Node module too, where Node's headers and OpenBLAS are there     3 min
#   checks   runtime_check and kernel_check: every kernel against its CPU reference                              2 min
#   speed    kernel_bench: transfers, the 8B model, attention, GEMM, rows            6 min
#   torch    prefill attention beside torch's flash attention, at the shapes just measured                       1 min
#   node     tests on the GPU, bench gpu for random:0.5b and random:8b; needs KVTIER_NODE                       10 min
#   sanitize kernel_check under compute-sanitizer: memcheck, then racecheck                                      3 min
#
# All that is found lies in build/gpu-session, also from earlier calls: a log per stage, figures-*.json, summary.txt.
#   OUT          a folder that gets summary and figures after each stage, and the rest as one archive: seven files at most
#   KVTIER_NODE  a folder with bin/node; beside it, or in the checkout, node_modules
#   KVTIER_MINUTES  for all stages together (25)
#
# On a machine with a limit of 30 minutes, 10 a command: `build checks`, then `speed torch`, then `node`, then `sanitize`.
set -u -o pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
emulated=no
if [ "${1:-}" = --emulated ]; then emulated=yes; shift; fi
known="build checks speed torch node sanitize"
stages=${*:-$known}
for stage in $stages; do
  case " $known " in *" $stage "*) ;; *) echo "$stage: unknown stage; there are: $known" >&2; exit 2 ;; esac
done
out=$root/build/gpu-session
mkdir -p "$out"
build=$root/build/$([ $emulated = yes ] && echo cuda-emulated || echo cuda)
deadline=$(($(date +%s) + ${KVTIER_MINUTES:-25} * 60))
failed=0

say() { echo "$(date +%T) $*" | tee -a "$out/summary.txt"; }
has() { command -v "$1" > /dev/null 2>&1; }
# A call that is cut off has handed over what was done by then.
hand_over() {
  [ -n "${OUT:-}" ] || return 0
  mkdir -p "$OUT"
  find "$out" -maxdepth 1 \( -name 'figures-*.json' -size +0 -o -name summary.txt \) -exec cp {} "$OUT" \;
  tar -C "$out" -czf "$OUT/details.tgz" --exclude=./cache .
}
# within SECONDS COMMAND...: no longer than that, and never past the session's end.
within() {
  local left=$((deadline - $(date +%s))) limit=$1
  shift
  if [ "$left" -lt 20 ]; then echo "no time is left for: $*"; return 124; fi
  timeout -k 5 $((limit < left ? limit : left)) "$@"
}
# What a stage lacks; empty: nothing.
lacks() {
  case $1 in
    build)
      has cmake || echo "cmake was not found"
      [ $emulated = yes ] || has nvcc || echo "nvcc was not found; install the CUDA toolkit 12 or newer, or put its bin into PATH"
      ;;
    checks) [ -x "$build/kernel_check" ] || echo "kernel_check was not built" ;;
    speed) [ -x "$build/kernel_bench" ] || echo "kernel_bench was not built: it is for a GPU only" ;;
    torch)
      python3 -c 'import torch; assert torch.cuda.is_available()' 2> /dev/null || echo "python3 has no torch that sees a GPU"
      [ -s "$out/figures-attention.json" ] || echo "stage speed has left no figures of attention"
      ;;
    node)
      [ -x "${KVTIER_NODE:-}/bin/node" ] || echo "no Node was given: KVTIER_NODE names a folder with bin/node"
      [ -f "$build/kvtier_cuda.node" ] || [ -f "$build/kvtier_cuda_emulated.node" ] || echo "the Node module was not built"
      [ -f "$root/build/data-plane/kvtier_data_plane.node" ] || echo "the data plane was not built (packages/base/data-plane/cc)"
      ;;
    sanitize)
      has compute-sanitizer || echo "compute-sanitizer was not found"
      [ -x "$build/kernel_check" ] || echo "kernel_check was not built"
      ;;
  esac
}

stage_build() {
  local generator=() options=(-DKVTIER_EMULATED=$([ $emulated = yes ] && echo ON || echo OFF))
  has ninja && generator=(-G Ninja)
  if [ $emulated = no ]; then
    # For the GPU that is here only: a third of the time of all of them.
    local capability
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -1 | tr -d .)
    [ "$capability" = 90 ] && capability=90a
    [ -n "$capability" ] && options+=("-DCMAKE_CUDA_ARCHITECTURES=$capability-real")
  fi
  within 60 cmake -S "$root/packages/engine/cuda" -B "$build" "${generator[@]}" "${options[@]}" || return
  local programs=(kernel_check runtime_check)
  [ $emulated = yes ] || programs+=(kernel_bench)
  within 400 cmake --build "$build" -j "$(nproc)" --target "${programs[@]}" || return
  # The rest needs node-addon-api and OpenBLAS: what is missing costs only the stage `node`.
  if [ -d "$root/node_modules/node-addon-api" ]; then
    within 200 cmake --build "$build" -j "$(nproc)" || echo "the Node module was not built (is OpenBLAS here?)"
    for part in base/data-plane engine/executor; do
      within 100 cmake -S "$root/packages/$part/cc" -B "$root/build/${part#*/}" "${generator[@]}" && within 200 cmake --build "$root/build/${part#*/}" -j "$(nproc)" ||
        echo "$part was not built"
    done
  fi
}

stage_checks() {
  within 120 "$build/runtime_check" > "$out/runtime_check.jsonl" || { grep '"ok":false' "$out/runtime_check.jsonl"; return 1; }
  within 300 "$build/kernel_check" > "$out/kernel_check.jsonl" || { grep '"ok":false' "$out/kernel_check.jsonl"; return 1; }
}

# In parts: what is cut off takes no figures of others with it. What is measured against the matrix rate brings `gemm` along.
stage_speed() {
  local bad=0
  for cases in transfer "model_8b gemm" "attention gemm" "rows rope sampling"; do
    within 150 "$build/kernel_bench" $cases > "$out/figures-${cases%% *}.json" || { echo "kernel_bench $cases failed"; bad=1; }
  done
  return $bad
}

stage_torch() { within 200 python3 "$root/packages/engine/cuda/checks/torch_attention.py" < "$out/figures-attention.json" > "$out/figures-torch.json"; }

stage_node() {
  export PATH="$KVTIER_NODE/bin:$PATH"
  [ -d "$root/node_modules" ] || ln -s "$KVTIER_NODE/node_modules" "$root/node_modules"
  export XDG_CACHE_HOME=${XDG_CACHE_HOME:-$out/cache}
  local filter=.gpu.slow.test.ts bad=0
  [ $emulated = yes ] && filter=cuda-emulated.slow.test.ts
  (cd "$root" && within 300 npx vitest run --project slow "$filter") || bad=1
  # Past set-up, which wants a network; the cases of kernel_bench are stage speed's.
  local bench='import { main } from "./bench/run.ts"; process.exit(await main(process.argv.slice(1), { ensureSystemPackages: async () => {} }));'
  [ $emulated = yes ] || (cd "$root" && within 500 node --import tsx --input-type=module -e "$bench" -- gpu --json none > "$out/figures-system.json") || bad=1
  rm -rf "$out/cache"
  return $bad
}

stage_sanitize() {
  local bad=0
  within 100 compute-sanitizer --tool memcheck --error-exitcode 9 "$build/kernel_check" attention gemm rows transfer || bad=1
  within 100 compute-sanitizer --tool racecheck --error-exitcode 9 "$build/kernel_check" attention_mixed attention_parts attention_tails gemm_tiles || bad=1
  return $bad
}

say "session: ${stages// /, }; $(git -C "$root" rev-parse --short HEAD 2> /dev/null || echo 'no git'); $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null || echo "no GPU")"
for stage in $stages; do
  missing=$(lacks "$stage" | head -1)
  if [ -n "$missing" ]; then say "SKIPPED $stage: $missing"; continue; fi
  start=$(date +%s)
  if "stage_$stage" > "$out/$stage.log" 2>&1; then verdict=ok; else verdict="FAILED ($(tail -1 "$out/$stage.log" | cut -c1-160))"; failed=1; fi
  say "$stage: $verdict, $(($(date +%s) - start)) s"
  hand_over
done
say "results in ${OUT:-$out}"
hand_over
exit $failed
