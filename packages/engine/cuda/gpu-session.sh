#!/bin/bash
# A machine with a GPU for some minutes: every figure of the CUDA backend, in the order of its worth, so that what is cut off is worth least.
# Runs from what `npm run gpu:bundle` packs, which needs nothing but a driver, or from a checkout that was built.
#
#   gpu-session.sh [--seconds N] [STAGE...]      default: all stages, for as long as they take
#
# With --seconds all is over within N seconds, verdicts and tidying included: a case is started only where the time that it usually takes
# is left, else it is said to be left out. All stages take about 20 minutes, what is asked of the figures (verdicts.awk) about 8.
#
#   probe     driver, disk, shared memory, libraries; fails without cuBLASLt, whose rate is the limit of all others
#   build     from the sources, where no programs for this GPU are there; needs nvcc, cmake, and ninja or make
#   checks    runtime_check and kernel_check: every kernel against its CPU reference; beside the cases of `system` that take no times
#   speed     kernel_bench: transfers, matrix products, attention, rows, the 8B model; attention beside torch's flash and cuDNN's
#   system    cold, warm from the arena and from a disk, start in parts, exports and imports beside decodes, equality, size of steps
#   connector libkvtier with torch's tensors, as vLLM's worker half uses it: bits, beside a captured graph, beside one pinned copy
#   whole     the same through the whole system, as `kvtier up` starts it with the Node of the archive: start in parts, cold, warm,
#             after a restart, decodes that are exported beside decodes that are not, by turns
#   sanitize  named cases of kernel_check under compute-sanitizer, each by itself
#
# The order is that of `plan` below, whatever the order of the arguments. Each case has a process and a longest time of its own.
#
# Written as it is measured, into OUT (default: results, beside this script): figures.jsonl and checks.jsonl, one line each; summary.txt,
# which ends with what is asked of the figures and what is short of it, also where the session is ended by a signal; log.txt. Lines of an
# earlier session in the same OUT are kept under other names (figures-1.jsonl) and do not count.
#
#   KVTIER_BENCH_DIR         a folder on the disk that is measured (scratch, beside this script; in a checkout build/gpu-scratch); what it gets is removed
#   KVTIER_BENCH_CACHE       a folder for what is measured of a machine once: digests, choices of products (cache; build/gpu-cache)
#   KVTIER_TORCH_PYTHON      a Python with torch and, for stage connector, protobuf (python3)
#   KVTIER_WITHOUT_CUBLASLT  1: go on without it
#
# Exit codes: 0 all that was run went well; 1 something failed, or a line of what is asked is incomplete; 2 wrong arguments; 3 no GPU, so
# nothing was measured; 4 no cuBLASLt; 129, 130, 143 ended by SIGHUP, SIGINT, SIGTERM.
set -u -o pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
known="probe build checks speed system connector whole sanitize"
end=''  # in seconds of the clock; nothing: no limit
if [ "${1:-}" = --seconds ]; then
  case ${2:-} in '' | *[!0-9]*) echo "--seconds ${2:-}: not a count of seconds; say for example --seconds 540" >&2; exit 2 ;; esac
  seconds=$2 end=$(($(date +%s) + $2))
  shift 2
fi
stages=${*:-$known}
for stage in $stages; do
  case " $known " in *" $stage "*) ;; *) echo "$stage: unknown stage; there are: $known" >&2; exit 2 ;; esac
done
if [ -d "$here/sources" ]; then  # unpacked from the archive
  sources=$here/sources bin=${KVTIER_GPU_BIN:-$here/bin} out=${OUT:-$here/results} beside=$here/
else
  sources=$(cd "$here/../../.." && pwd)
  bin=${KVTIER_GPU_BIN:-$sources/build/cuda} out=${OUT:-$sources/build/gpu-session} beside=$sources/build/gpu-
fi
packed=$here/system
cuda=$sources/packages/engine/cuda
compiled=''  # by stage build
python=${KVTIER_TORCH_PYTHON:-python3}
# Neither belongs into OUT, which is carried away: a disk tier has 24 GiB, and a second session on this machine finds the cache.
disk_given=${KVTIER_BENCH_DIR:-}
disk=${KVTIER_BENCH_DIR:-${beside}scratch}
cache=${KVTIER_BENCH_CACHE:-${beside}cache}
mkdir -p "$out" "$disk" "$cache" || { echo "gpu-session.sh: no folder can be made there; name others in OUT, KVTIER_BENCH_DIR and KVTIER_BENCH_CACHE" >&2; exit 2; }
out=$(cd "$out" && pwd) cache=$(cd "$cache" && pwd) disk=$(cd "$disk" && pwd)
scratch=$(mktemp -d "$disk/kvtier-gpu-XXXXXX") || exit 2
export KVTIER_BENCH_DIR=$scratch
closing=5  # seconds, of the limit, for verdicts and for what is still to be ended
failed=0
begun='' running='' started=0 before=0 child='' checking=''

exec 4>&1  # what `say` says: a signal may come while a case writes elsewhere
say() { echo "$(date +%T) $*" | tee -a "$out/summary.txt" "$out/log.txt" >&4; }
has() { command -v "$1" > /dev/null 2>&1; }
quoted() { printf '%s' "$1" | tr -d '\n\r\t' | sed 's/[\\"]/\\&/g; s/^/"/; s/$/"/'; }
seconds_left() { [ -n "$end" ] && echo $((end - closing - $(date +%s))) || echo 86400; }
# within SECONDS COMMAND...: no longer than that, and never past the session's end. Beside this shell, which can be told meanwhile to end.
within() {
  local left limit=$1 code
  left=$(seconds_left)
  shift
  [ "$left" -gt 0 ] || { echo "no time is left for: $*" >&2; return 124; }
  timeout -k 5 $((limit < left ? limit : left)) "$@" <&0 3<&- 4>&- &
  child=$!
  wait "$child"
  code=$?
  child=''
  return $code
}
# Asked once, and not for long: with a GPU that fell off the bus it hangs. Name, driver, what else is told, compute capability.
ask_smi() {
  local fields=name,driver_version,memory.total,memory.free,pcie.link.gen.max,pcie.link.width.max,compute_cap
  has nvidia-smi || { echo 'no nvidia-smi' > "$scratch/smi"; return; }
  within 10 nvidia-smi "--query-gpu=$fields" --format=csv,noheader > "$scratch/smi" 2>&1
  [ $? -lt 124 ] || echo 'nvidia-smi does not answer' > "$scratch/smi"
}
smi() { head -1 "$scratch/smi" | cut -d, -f "$1" | sed 's/^ *//'; }
# cuBLASLt as pip installs it, or the toolkit, is not in the library path by itself.
find_libraries() {
  local folder
  for folder in $("$python" -c 'import site, sys; print(*{*site.getsitepackages(), *(p for p in sys.path if p.endswith("-packages"))})' 2> /dev/null); do
    for folder in "$folder"/nvidia/*/lib; do [ -e "$folder"/libcublasLt.so.1[23] ] && LD_LIBRARY_PATH="$folder:${LD_LIBRARY_PATH:-}"; done
  done 2> /dev/null
  for folder in /usr/local/cuda*/lib64; do [ -d "$folder" ] && LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}:$folder"; done
  export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}
}
program() { [ -n "$compiled" ] && [ -x "$compiled/$1" ] && echo "$compiled/$1" || echo "$bin/$1"; }
# of_case KEY WORDS: a line about the case that runs, which is no figure.
of_case() { echo "{\"case\":$(quoted "$running"),\"$1\":$(quoted "$2")}" >> "$out/figures.jsonl"; }

# Stage, seconds that it takes on an H200, longest seconds, case: in the order of what is asked, then of what is nearest to it. Cases of
# kernel_bench that are not named here come last. Its cases of equality take no times, so that checks run beside these, behind the longest
# case that is asked: what is timed next waits for a check that hangs.
plan() {
  local tool name
  echo 'probe 10 60 probe
build 2 560 build
speed 15 90 transfer
speed 25 90 transfer_while_decoding
speed 25 90 model_8b
speed 20 90 model_8b_unequal
system 25 120 system_8192
whole 90 240 through the system: cuda random:8b 10000 8192
system 35 120 system_beside_decode
connector 25 90 connector
checks 80 420 checks
system 60 150 system_equal
system 20 120 system_equal_bits
speed 20 90 attention_prefill
speed 20 90 attention_tail
speed 40 120 torch_attention
system 30 120 system_512
whole 75 240 through the system: cuda random:8b 10000 512
speed 20 90 model_8b_tails
system 40 120 system_disk
system 20 120 system_start
whole 50 120 through the system: cuda random:0.5b'
  has compute-sanitizer || { echo "sanitize 1 1 compute-sanitizer"; return; }
  for tool in memcheck racecheck; do
    for name in attention_mixed_batches attention_parts attention_tails gemm_tiles transfer_hash transfer_layers sampling norm rope; do
      echo "sanitize 15 60 $tool $name"
    done
  done
}
others() {
  local name
  for name in $("$(program kernel_bench)" --list 2> /dev/null); do
    grep -qE "^(speed|system) [0-9]+ [0-9]+ $name\$" "$scratch/plan" || case $name in system_*) echo "system 20 120 $name" ;; *) echo "speed 20 90 $name" ;; esac
  done
}

case_probe() {
  local bad=0 rest
  head -3 "$scratch/smi"
  say "machine: $(nproc) CPUs, $(awk '/MemAvailable/ {printf "%d", $2 / 1048576}' /proc/meminfo) GiB of memory free, /dev/shm $(df -BG --output=avail /dev/shm | tail -1 | tr -d ' ') free, $disk $(df -BG --output=avail "$disk" | tail -1 | tr -d ' ') free, locked memory $(ulimit -l), nvcc $(has nvcc && echo yes || echo no), compute-sanitizer $(has compute-sanitizer && echo yes || echo no), torch $(within 10 "$python" -c 'from importlib.metadata import version; print(version("torch"))' 2> /dev/null || echo no)"
  if [ ! -x "$(program kernel_bench)" ]; then say "probe: no programs are here; stage build makes them"; return 0; fi
  rest=$(ldd "$(program kernel_bench)" 2>&1 | grep 'not found') && { say "probe: libraries are missing: $rest"; bad=1; }
  within "$1" "$(program kernel_bench)" --probe --rate > "$scratch/probe" 2>> "$out/log.txt" || { say "probe: the GPU was not opened: $(tail -1 "$out/log.txt")"; return 1; }
  cat "$scratch/probe" >> "$out/figures.jsonl"
  say "probe: $(cat "$scratch/probe")"
  grep -q '"cublaslt":"cuBLASLt' "$scratch/probe" || {
    say "FAILED probe: cuBLASLt was not found: no rate would have its limit; name its folder in LD_LIBRARY_PATH (KVTIER_WITHOUT_CUBLASLT=1 goes on)"
    [ "${KVTIER_WITHOUT_CUBLASLT:-}" = 1 ] || { running=''; exit 4; }
  }
  return $bad
}

case_build() {
  if [ -x "$(program kernel_bench)" ] && within 60 "$(program runtime_check)" launch > /dev/null 2>&1; then echo "the programs that are here run on this GPU"; return 0; fi
  has nvcc && has cmake || { echo 'programs for this GPU are missing, and nvcc or cmake too; pack them: npm run gpu:bundle -- --architectures "80-real;90a-real"'; return 1; }
  local generator=() architecture folder=/tmp/kvtier-gpu-build
  has ninja && generator=(-G Ninja)
  architecture=$(smi 7 | grep -xE '[0-9]+\.[0-9]+' | tr -d .)
  [ "$architecture" = 90 ] && architecture=90a
  within 60 cmake -S "$cuda" -B "$folder" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CUDA_ARCHITECTURES=${architecture:-90a}-real" || return
  within 500 cmake --build "$folder" -j "$(nproc)" --target kernel_check runtime_check kernel_bench || return
  compiled=$folder
}

# checks_within SECONDS COMMAND: beside this shell, and never past the session's end.
checks_within() {
  local left
  left=$(seconds_left)
  timeout -k 5 $(($1 < left ? $1 : left)) bash -c "$2" "$(program runtime_check)" "$(program kernel_check)" "$scratch" "$out/checks.jsonl" < /dev/null >> "$out/log.txt" 2>&1 3<&- 4>&- &
  checking=$!
}
# First runtime_check, by itself: it asks how much of the device is free, and what others take and free would be its failure. Then the others, side
# by side: most of their time is the reference's, on the CPU. Each has a context of its own: of 16 at a time an H200 refused some.
# What a check said comes into checks.jsonl as soon as it has ended, in one write.
case_checks() {
  local left check='timeout --foreground -k 5 120 "$0" $3 > "$2/check-$1" || echo "{\"kernel\":\"$1\",\"case\":\"ended with code $?\",\"ok\":false}" >> "$2/check-$1"
    cat "$2/check-$1" >> "$4" && rm "$2/check-$1"'
  checking_from=$(date +%s)
  export check
  checks_within "$1" 'bash -c "$check" "$0" runtime_check "$2" "" "$3"'
  wait "$checking"
  left=$((checking_from + $1 - $(date +%s)))
  if [ "$left" -le 0 ] || [ "$(seconds_left)" -le 0 ]; then
    checking=''
    told_checks late
    return
  fi
  checks_within "$left" '"$1" --list | xargs -P "$(($(nproc) < 8 ? $(nproc) : 8))" -I {} bash -c "$check" "$1" {} "$2" {} "$3"'
}
# Checks that run are awaited before anything is timed.
settle() {
  [ -n "$checking" ] || return 0
  wait "$checking"
  local code=$?
  checking=''
  told_checks $code
}
told_checks() {
  local bad part
  for part in "$scratch"/check-*; do  # of what was ended, if not between its write and its end
    [ ! -s "$part" ] || grep -qxF "$(head -1 "$part")" "$out/checks.jsonl" || cat "$part" >> "$out/checks.jsonl"
  done
  [ "$1" = 0 ] && grep -q '"ok":true' "$out/checks.jsonl" && ! grep -q '"ok":false' "$out/checks.jsonl" && { say "checks: ok, $(($(date +%s) - checking_from)) s"; return; }
  failed=1
  bad=$(grep '"ok":false' "$out/checks.jsonl" | head -1 | cut -c1-160)
  say "checks: FAILED (${bad:-did not end}), $(($(date +%s) - checking_from)) s"
}

# Lines of JSON to a file and nowhere else, each as it comes; what people read goes to the log.
case_speed() {
  [ "$2" = torch_attention ] && { torch_attention "$1"; return; }
  within "$1" "$(program kernel_bench)" --case "$2" >> "$out/figures.jsonl"
}
case_system() { case_speed "$@"; }

torch_attention() {
  local code
  has "$python" || { no_python speed; return; }
  grep '"name":"Attention v2' "$out/figures.jsonl" > "$scratch/attention"
  within "$1" "$python" "$(beside_script torch_attention.py)" < "$scratch/attention" >> "$out/figures.jsonl" 2> "$scratch/torch"
  code=$?
  ended_there $code speed
}
no_python() {
  echo "there is no $python" > "$scratch/torch"
  ended_there 3 "$1"
}
# ended_there CODE STAGE: of a program in Python, which ends with 3 where that lacks something.
ended_there() {
  cat "$scratch/torch"
  [ "$1" = 3 ] || return "$1"
  say "$2: $(tail -1 "$scratch/torch")"
  of_case leftOut "$(tail -1 "$scratch/torch")"
}
case_connector() {
  local code path=$here/connector
  has "$python" || { no_python connector; return; }
  [ -d "$path" ] || path=$sources/packages/connector/python/src
  within "$1" env PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 "$python" "$(beside_script connector_gpu.py)" >> "$out/figures.jsonl" 2> "$scratch/torch"
  code=$?
  ended_there $code connector
}
beside_script() { [ -d "$here/checks" ] && echo "$here/checks/$1" || echo "$here/$1"; }

# A case of the packed system. Machines without a C++ runtime get the packed one.
packed_system() {
  local seconds=$1 path=${LD_LIBRARY_PATH:-}
  if [ ! -x "$packed/node" ]; then
    echo "no Node is packed here: figures through the whole system need the archive of npm run gpu:bundle, or a checkout: npm run bench -- gpu" >&2
    return 1
  fi
  ldd "$packed/node" 2>&1 | grep -q 'not found' && path=$packed/lib:$path
  within "$seconds" env LD_LIBRARY_PATH="$path" XDG_CACHE_HOME="$cache" "$packed/node" "$packed/build/programs/bench/gpu-system.mjs" "${@:2}"
}
packed_runs() {
  local exe
  for exe in /proc/[0-9]*/exe; do [ "$exe" -ef "$packed/node" ] && return; done 2> /dev/null
  return 1
}
# Of a system that was killed: its processes still hold the GPU's memory for a while, and its arena lies in shared memory, named by its data
# folder (packages/base/data-plane/src/places.ts). The next system needs both. clear_away TENTHS: of a second, that it waits for them at most.
clear_away() {
  local i place id
  for ((i = 0; i < $1; i++)); do packed_runs && [ "$(seconds_left)" -gt 0 ] || break; sleep 0.1; done
  for place in "$scratch"/kvtier-system-*/*/place.id; do
    id=$(readlink "$place") && [[ $id =~ ^[0-9]+-([0-9a-f]{8})$ ]] && rm -f "/dev/shm/kvtier-${BASH_REMATCH[1]}-"*
  done
}
case_whole() {
  local code
  # shellcheck disable=SC2086 # its words are the arguments
  packed_system "$1" ${2#through the system: } >> "$out/figures.jsonl"
  code=$?
  [ $code = 0 ] || clear_away 120
  return $code
}

# Without a GPU: that the packed system starts here, answers, and finds its blocks again, on the CPU with a made-up model.
dry_whole() {
  case " $stages " in *" whole "*) ;; *) return 0 ;; esac
  [ -d "$packed" ] || return 0
  if packed_system 180 cpu random:1m 600 > "$out/dry-run.jsonl" 2>> "$out/log.txt"; then
    say "dry run: the packed system runs here, on the CPU: $(grep -c '"value"' "$out/dry-run.jsonl") lines in $out/dry-run.jsonl, none of them a figure"
  else
    say "FAILED dry run: the packed system does not run here: $(cat "$out/log.txt" "$out/dry-run.jsonl" 2> /dev/null | tail -1)"
    exit 1
  fi
}

# One case at a time: a report names it, and what takes too long costs itself only.
case_sanitize() {
  local tool=${2% *} name=${2#* } ok=true
  has compute-sanitizer || { echo "compute-sanitizer was not found"; return 1; }
  # Calls that the driver refuses, as some cases want it to, are no errors of memory.
  within "$1" compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 9 "$(program kernel_check)" "$name" || ok=false
  echo "{\"kernel\":\"compute-sanitizer $tool\",\"case\":$(quoted "$name"),\"ok\":$ok}" >> "$out/checks.jsonl"
  [ $ok = true ]
}

# run_case STAGE USUAL MOST CASE. A case of figures that fails without a word gets its line here.
run_case() {
  local usual=$2 most=$3 left code verdict logged
  running=$4
  case $running in checks | system_equal | system_equal_bits) ;; *) settle ;; esac
  left=$(seconds_left)
  if [ "$usual" -gt "$left" ]; then
    say "$running: left out: it usually takes $usual s, $((left > 0 ? left : 0)) s are left"
    of_case leftOut "it usually takes $usual s, $((left > 0 ? left : 0)) s were left"
    running=''
    return
  fi
  if [ "$running" = checks ]; then running=''; case_checks "$most"; return; fi
  started=$(date +%s) before=$(wc -l < "$out/figures.jsonl") logged=$(wc -l < "$out/log.txt")
  "case_$1" "$most" "$running" >> "$out/log.txt" 2>&1
  code=$?
  verdict=ok
  if [ $code = 0 ]; then
    told_ran
  else
    failed=1 verdict="FAILED ($(tail -n +$((logged + 1)) "$out/log.txt" | tail -1 | cut -c1-160))"
    if [ $(($(date +%s) - started)) -ge $((most < left ? most : left)) ]; then explain "did not end in time, and was killed"; else explain "ended with code $code"; fi
  fi
  say "$running: $verdict, $(($(date +%s) - started)) s"
  running=''
}
# That a case of figures has ended well, so that one which gave none of those that are asked of it is told from one that was not run.
told_ran() {
  case $stage in speed | system | connector | whole) ;; *) return ;; esac
  tail -n +$((before + 1)) "$out/figures.jsonl" | grep -q '"leftOut"' || echo "{\"case\":$(quoted "$running"),\"ran\":true}" >> "$out/figures.jsonl"
}
explain() {
  case $stage in speed | system | connector | whole) ;; *) return ;; esac
  [ -z "$(tail -c 1 "$out/figures.jsonl")" ] || echo >> "$out/figures.jsonl"  # half a line of what was killed
  tail -n +$((before + 1)) "$out/figures.jsonl" | grep -q '"error"' || of_case error "$1"
}

# However the session ends, what was measured is judged first.
finish() {
  local code=$?
  trap '' TERM INT HUP
  [ -z "$child" ] || kill -TERM "$child" 2> /dev/null
  [ -z "$checking" ] || { kill -TERM "$checking" 2> /dev/null; told_checks ended; }
  [ -z "$running" ] || { say "$running: ended from outside, after $(($(date +%s) - started)) s"; explain "was ended from outside"; }
  if [ -n "$begun" ] && grep -q '"ratio"\|"case"' "$out/figures.jsonl"; then
    awk -f "$here/verdicts.awk" "$out/figures.jsonl" > "$scratch/verdicts" || [ $code != 0 ] || code=1
    while read -r line; do say "asked: $line"; done < "$scratch/verdicts"
  fi
  [ -z "$begun" ] || say "results in $out: $(grep -c '"value"' "$out/figures.jsonl") figures, $(grep -c '"error"' "$out/figures.jsonl") cases that failed"
  for ((i = 0; i < 60; i++)); do  # timeout ends what takes no notice of a signal; what hangs in a driver is left
    [ -n "$(jobs -pr)" ] || packed_runs || break
    sleep 0.1
  done
  clear_away 0
  rm -rf "$scratch" 2> /dev/null
  [ -n "$disk_given" ] || rmdir "$disk" 2> /dev/null
  exit $code
}

find_libraries
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
# The first line of figures.jsonl: of which day, build and machine they are, for `npm run gpu:record`.
told_session() {
  local commit gpu
  if ! commit=$(cat "$here/commit" 2> /dev/null); then
    commit=$(git -C "$sources" rev-parse --short HEAD 2> /dev/null || echo unknown)
    [ -z "$(git -C "$sources" status --porcelain --untracked-files=no -- ':(top)' ':(top,exclude)bench/results' 2> /dev/null)" ] || commit=$commit+
  fi
  gpu=$(sed -n 's/.*"device":"\([^"]*\)".*/\1/p' "$scratch/device" 2> /dev/null)
  echo "{\"session\":{\"at\":$(quoted "$(date -u +%F)"),\"commit\":$(quoted "$commit"),\"machine\":$(quoted "$(grep -c '^processor' /proc/cpuinfo) x $(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -1 | sed 's/ *$//'), ${gpu:-$(smi 1)}"),\"stages\":$(quoted "$stages")}}" >> "$out/figures.jsonl"
}

if [ -x "$(program kernel_bench)" ]; then
  "$(program kernel_bench)" --list > /dev/null || { say "FAILED: $(program kernel_bench) does not run on this machine (its CPU lacks x86-64-v3?)"; exit 1; }
  within 60 "$(program kernel_bench)" --probe > "$scratch/device" 2> "$scratch/no-gpu"
  if missing=$(grep '^no GPU' "$scratch/no-gpu"); then
    say "dry run: $missing; the programs start here, and nothing was measured: ${stages// /, }"
    dry_whole
    exit 3
  fi
elif ! has nvidia-smi; then
  say "dry run: no GPU (no nvidia-smi) and no programs for one: nothing was measured: ${stages// /, }"
  dry_whole
  exit 3
fi
for name in figures checks; do
  [ ! -s "$out/$name.jsonl" ] || mv "$out/$name.jsonl" "$out/$name-$(($(find "$out" -maxdepth 1 -name "$name-*.jsonl" | wc -l) + 1)).jsonl"
  : > "$out/$name.jsonl"
done
begun=1
ask_smi
told_session
say "session: ${stages// /, }${end:+, within $seconds s}; $(smi 1,2)"
run_all() {
  while read -r stage usual most name <&3; do
    case " $stages " in *" $stage "*) run_case "$stage" "$usual" "$most" "$name" ;; esac
  done 3< "$1"
}
plan > "$scratch/plan"
run_all "$scratch/plan"
others > "$scratch/others"  # by what stage build may have made
run_all "$scratch/others"
settle
exit $failed
