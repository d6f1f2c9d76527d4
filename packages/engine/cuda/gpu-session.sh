#!/bin/bash
# A machine with a GPU for half an hour: every figure of the CUDA backend, in the order of its worth, so that what is cut off is worth least.
# Runs from what `npm run gpu:bundle` packs, which needs nothing but a driver, or from a checkout that was built.
#
#   gpu-session.sh [STAGE...]      default: all stages; each takes nine minutes at most
#
#   probe     driver, disk, shared memory, libraries; fails without cuBLASLt, whose rate is the limit of all others                1 min
#   build     from the sources, where no programs for this GPU are there; needs nvcc, cmake, and ninja or make
#   checks    runtime_check and kernel_check: every kernel against its CPU reference                                               2 min
#   speed     kernel_bench: transfers, matrix products, attention, rows, the 8B model; attention beside torch's flash and cuDNN's  8 min
#   system    cold, warm from the arena and from a disk, start in parts, exports and imports beside decodes, equality, size of steps  7 min
#   whole     the same through the whole system, as `kvtier up` starts it with the Node of the archive: start in parts, cold, warm,
#             after a restart, decodes beside exports                                                                              8 min
#   sanitize  named cases of kernel_check under compute-sanitizer, each by itself                                                  5 min
#
# Written as it is measured, into OUT (default: results, beside this script): figures.jsonl and checks.jsonl, one line each; summary.txt,
# which ends with what is asked of the figures and what is short of it (verdicts.awk); log.txt.
#
#   KVTIER_BENCH_DIR         a folder on the disk that is measured (OUT)
#   KVTIER_TORCH_PYTHON      a Python with torch (python3)
#   KVTIER_WITHOUT_CUBLASLT  1: go on without it
#
# Exit codes: 0 all went well; 1 something failed; 2 wrong arguments; 3 no GPU, so nothing was measured; 4 no cuBLASLt.
set -u -o pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
known="probe build checks speed system whole sanitize"
stages=${*:-$known}
for stage in $stages; do
  case " $known " in *" $stage "*) ;; *) echo "$stage: unknown stage; there are: $known" >&2; exit 2 ;; esac
done
if [ -d "$here/sources" ]; then  # unpacked from the archive
  sources=$here/sources bin=${KVTIER_GPU_BIN:-$here/bin} out=${OUT:-$here/results}
else
  sources=$(cd "$here/../../.." && pwd)
  bin=${KVTIER_GPU_BIN:-$sources/build/cuda} out=${OUT:-$sources/build/gpu-session}
fi
compiled=$out/programs
packed=$here/system
cuda=$sources/packages/engine/cuda
python=${KVTIER_TORCH_PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export KVTIER_BENCH_DIR=${KVTIER_BENCH_DIR:-$out}
stage_seconds=540
failed=0

say() { echo "$(date +%T) $*" | tee -a "$out/summary.txt"; }
has() { command -v "$1" > /dev/null 2>&1; }
quoted() { printf '%s' "$1" | tr -d '\n' | sed 's/[\\"]/\\&/g; s/^/"/; s/$/"/'; }
# within SECONDS COMMAND...: no longer than that, and never past the stage's end.
within() {
  local left=$((deadline - $(date +%s))) limit=$1
  shift
  if [ "$left" -lt 5 ]; then echo "no time is left for: $*" >&2; return 124; fi
  timeout -k 5 $((limit < left ? limit : left)) "$@"
}
# cuBLASLt as pip installs it, or the toolkit, is not in the library path by itself.
find_libraries() {
  local folder
  for folder in $("$python" -c 'import site, sys; print(*{*site.getsitepackages(), *(p for p in sys.path if p.endswith("-packages"))})' 2> /dev/null); do
    for folder in "$folder"/nvidia/*/lib; do [ -e "$folder"/libcublasLt.so.1[23] ] && LD_LIBRARY_PATH="$folder:${LD_LIBRARY_PATH:-}"; done
  done 2> /dev/null
  for folder in /usr/local/cuda*/lib64; do [ -d "$folder" ] && LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}:$folder"; done
  export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}
}
program() { [ -x "$compiled/$1" ] && echo "$compiled/$1" || echo "$bin/$1"; }
# Lines of JSON to a file and nowhere else, each as it comes; what people read goes to the log.
figures() { within "$@" 2>> "$out/log.txt" >> "$out/figures.jsonl"; }

# whole SECONDS BACKEND MODEL...: a case of the packed system, its figures on stdout. Machines without a C++ runtime get the packed one.
whole() {
  local seconds=$1 path=${LD_LIBRARY_PATH:-}
  if [ ! -x "$packed/node" ]; then
    echo "no Node is packed here: figures through the whole system need the archive of npm run gpu:bundle, or a checkout: npm run bench -- gpu" >&2
    return 1
  fi
  ldd "$packed/node" 2>&1 | grep -q 'not found' && path=$packed/lib:$path
  within "$seconds" env LD_LIBRARY_PATH="$path" XDG_CACHE_HOME="$KVTIER_BENCH_DIR/cache" \
    "$packed/node" "$packed/build/programs/bench/gpu-system.mjs" "${@:2}"
}

stage_probe() {
  local bad=0 gpu rest
  nvidia-smi --query-gpu=name,driver_version,memory.total,memory.free,pcie.link.gen.max,pcie.link.width.max --format=csv,noheader 2>&1 | head -3
  say "machine: $(nproc) CPUs, $(awk '/MemAvailable/ {printf "%d", $2 / 1048576}' /proc/meminfo) GiB of memory free, /dev/shm $(df -BG --output=avail /dev/shm | tail -1 | tr -d ' ') free, $KVTIER_BENCH_DIR $(df -BG --output=avail "$KVTIER_BENCH_DIR" | tail -1 | tr -d ' ') free, locked memory $(ulimit -l), nvcc $(has nvcc && echo yes || echo no), compute-sanitizer $(has compute-sanitizer && echo yes || echo no), torch $("$python" -c 'import torch; print(torch.__version__)' 2> /dev/null || echo no)"
  if [ ! -x "$(program kernel_bench)" ]; then say "probe: no programs are here; stage build makes them"; return 0; fi
  rest=$(ldd "$(program kernel_bench)" 2>&1 | grep 'not found') && { say "probe: libraries are missing: $rest"; bad=1; }
  gpu=$(within 60 "$(program kernel_bench)" --probe 2>> "$out/log.txt") || { say "probe: the GPU was not opened: $(tail -1 "$out/log.txt")"; return 1; }
  echo "$gpu" >> "$out/figures.jsonl"
  say "probe: $gpu"
  case $gpu in *'"cublaslt":"cuBLASLt'*) ;; *)
    say "FAILED probe: cuBLASLt was not found: no rate would have its limit; name its folder in LD_LIBRARY_PATH (KVTIER_WITHOUT_CUBLASLT=1 goes on)"
    [ "${KVTIER_WITHOUT_CUBLASLT:-}" = 1 ] || exit 4
  esac
  return $bad
}

stage_build() {
  if [ -x "$(program kernel_bench)" ] && within 60 "$(program runtime_check)" launch > /dev/null 2>&1; then echo "the programs that are here run on this GPU"; return 0; fi
  has nvcc && has cmake || { echo 'programs for this GPU are missing, and nvcc or cmake too; pack them: npm run gpu:bundle -- --architectures "80-real;90a-real"'; return 1; }
  local generator=() architecture
  has ninja && generator=(-G Ninja)
  architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -1 | tr -d .)
  [ "$architecture" = 90 ] && architecture=90a
  within 60 cmake -S "$cuda" -B /tmp/kvtier-gpu-build "${generator[@]}" -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CUDA_ARCHITECTURES=${architecture:-90a}-real" || return
  within 500 cmake --build /tmp/kvtier-gpu-build -j "$(nproc)" --target kernel_check runtime_check kernel_bench || return
  compiled=/tmp/kvtier-gpu-build
}

stage_checks() {
  local bad=0
  within 120 "$(program runtime_check)" >> "$out/checks.jsonl" || bad=1
  # Side by side: most of their time is the reference's, on the CPU. Each has a context of its own: of 16 at a time an H200 refused some.
  parts=$(mktemp -d)
  "$(program kernel_check)" --list |
    within 420 xargs -P "$(($(nproc) < 8 ? $(nproc) : 8))" -I {} bash -c 'timeout -k 5 120 "$0" "$1" > "$2/$1" ||
        { echo "{\"kernel\":\"kernel_check\",\"case\":\"$1\",\"ok\":false}" >> "$2/$1"; false; }' "$(program kernel_check)" {} "$parts" || bad=1
  cat "$parts"/* >> "$out/checks.jsonl" && rm -r "$parts"
  grep '"ok":false' "$out/checks.jsonl" && bad=1
  return $bad
}

stage_speed() {
  local bad=0
  figures 400 "$(program kernel_bench)" --seconds 90 transfer model_8b gemm attention rows rope sampling || bad=1
  grep '"name":"Attention v2' "$out/figures.jsonl" | figures 120 "$python" "$here/$([ -d "$here/checks" ] && echo checks/)torch_attention.py" ||
    say "speed: torch was not measured: $(tail -1 "$out/log.txt")"
  return $bad
}

stage_system() { figures 520 "$(program kernel_bench)" --seconds 120 system_; }

stage_whole() {
  local bad=0
  whole 120 cuda random:0.5b >> "$out/figures.jsonl" 2>> "$out/log.txt" || bad=1
  whole 300 cuda random:8b 10000 512 >> "$out/figures.jsonl" 2>> "$out/log.txt" || bad=1
  whole 180 cuda random:8b 10000 8192 >> "$out/figures.jsonl" 2>> "$out/log.txt" || bad=1
  [ $bad = 0 ] || { tail -1 "$out/log.txt"; grep '"error"' "$out/figures.jsonl" | tail -1; return 1; }
}

# Without a GPU: that the packed system starts here, answers, and finds its blocks again, on the CPU with a made-up model.
dry_whole() {
  case " $stages " in *" whole "*) ;; *) return 0 ;; esac
  [ -d "$packed" ] || return 0
  deadline=$(($(date +%s) + 200))
  if whole 180 cpu random:1m 600 > "$out/dry-run.jsonl" 2>> "$out/log.txt"; then
    say "dry run: the packed system runs here, on the CPU: $(grep -c '"value"' "$out/dry-run.jsonl") lines in $out/dry-run.jsonl, none of them a figure"
  else
    say "FAILED dry run: the packed system does not run here: $(cat "$out/log.txt" "$out/dry-run.jsonl" 2> /dev/null | tail -1)"
    exit 1
  fi
}

# One case at a time: a report names it, and what takes too long costs itself only.
stage_sanitize() {
  local bad=0 tool name ok
  has compute-sanitizer || { echo "compute-sanitizer was not found"; return 1; }
  for tool in memcheck racecheck; do
    for name in attention_mixed_batches attention_parts attention_tails gemm_tiles transfer_hash transfer_layers sampling norm rope; do
      # Calls that the driver refuses, as some cases want it to, are no errors of memory.
      within 60 compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 9 "$(program kernel_check)" "$name" >> "$out/log.txt" 2>&1 && ok=true || { ok=false; bad=1; }
      echo "{\"kernel\":\"compute-sanitizer $tool\",\"case\":$(quoted "$name"),\"ok\":$ok}" >> "$out/checks.jsonl"
      [ $ok = true ] || echo "$tool $name: $(tail -2 "$out/log.txt" | head -1)"
    done
  done
  return $bad
}

find_libraries
if [ -x "$(program kernel_bench)" ]; then
  "$(program kernel_bench)" --list > /dev/null || { say "FAILED: $(program kernel_bench) does not run on this machine (its CPU lacks x86-64-v3?)"; exit 1; }
  missing=$(timeout 60 "$(program kernel_bench)" --probe 2>&1 > /dev/null | grep '^no GPU' || true)
  if [ -n "$missing" ]; then
    say "dry run: $missing; the programs start here, and nothing was measured: ${stages// /, }"
    dry_whole
    exit 3
  fi
elif ! has nvidia-smi; then
  say "dry run: no GPU (no nvidia-smi) and no programs for one: nothing was measured: ${stages// /, }"
  dry_whole
  exit 3
fi
say "session: ${stages// /, }; $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null || echo 'no nvidia-smi')"
for stage in $stages; do
  start=$(date +%s)
  deadline=$((start + stage_seconds))
  if "stage_$stage" >> "$out/log.txt" 2>&1; then verdict=ok; else verdict="FAILED ($(tail -1 "$out/log.txt" | cut -c1-160))"; failed=1; fi
  say "$stage: $verdict, $(($(date +%s) - start)) s"
done
! grep -q '"ratio"' "$out/figures.jsonl" 2> /dev/null || awk -f "$here/verdicts.awk" "$out/figures.jsonl" | while read -r line; do say "asked: $line"; done
say "results in $out: $(grep -c '"value"' "$out/figures.jsonl" 2> /dev/null || echo 0) figures, $(grep -c '"error"' "$out/figures.jsonl" 2> /dev/null || echo 0) cases that failed"
exit $failed
