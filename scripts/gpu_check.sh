#!/usr/bin/env bash
# Checks this checkout on a machine with a GPU. It builds the library for that GPU in place, runs the tests that
# need one, records what the GPU's instructions compute, and compares speeds with torch.
#
#   scripts/gpu_check.sh --all             every step, in the order below
#   scripts/gpu_check.sh --build --test    some of them; every other step needs --build once before
#
#   --build    compile for the GPU that is here, in place
#   --hopper   on compute capability 9.0: its products and copies alone, as the kernels request them
#   --test     the tests of the GPU; it is a failure if none can be used
#   --device   the tests of numbers, gradients and modules with their tensors on the GPU, likewise
#   --suite    the rest of the tests
#   --check    the kernels against nvcc's and the disassembler's reports, for this GPU's architecture
#   --golden   the GPU's answers to every instruction of sm80 that the PTX machine executes, as golden.tar: unpack it
#              in simulators/ptx_machine/golden and commit that, so that the machine's tests replay it
#   --bench    the table of speeds beside each backend of torch's scaled_dot_product_attention
#   --quick    with --bench: fewer cases
#
# A step takes at most 8 minutes on 16 cores: a step that runs longer is stopped and counts as failed
# (STEP_SECONDS changes the limit). Steps after a failed one still run. Nothing is downloaded and nothing
# installed: PYTHON (default: python3) needs torch with CUDA, setuptools, ninja and pytest, and nvcc must be there.
# Everything goes into OUT (default: gpu-results): log.txt, which grows with every call, and the steps' results.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
exec </dev/null

# The package is built in place, not installed.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
limit=${STEP_SECONDS:-480}
out=${OUT:-gpu-results}
steps=()
quick=()
gpu_tests=(tests/cuda/test_cuda.py tests/cuda/test_cuda_runtime.py tests/cuda/test_cuda_sequences.py tests/cuda/test_cuda_sizes.py
  tests/cuda/test_cuda_tangents.py tests/cuda/test_cuda_training.py)
# These tests need the network or packages that such a machine may lack.
elsewhere=(--ignore=tests/building/test_install.py --ignore=tests/documents/test_notebook.py --ignore=tests/documents/test_source_notebooks.py)
summary=()

usage() { sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"; }

wanted() { # prints the steps in the order of the help, whatever the order of the arguments
  local step
  for step in build hopper test device suite check golden bench; do
    case " ${steps[*]} " in *" $step "* | *" all "*) echo "$step" ;; esac
  done
}

architecture() { # prints this GPU's architecture, with its own instructions if the kernels may use them
  "$python" -c '
import torch
capability = "%d%d" % torch.cuda.get_device_capability()
print({"90": "90a"}.get(capability, capability))'
}

# shellcheck disable=SC2329  # called in a bash of its own, which can be stopped
record_golden() { # record_golden PYTHON ARCHITECTURE ARCHIVE
  folder=$(mktemp -d) || return
  trap 'rm -rf "$folder"' EXIT
  PATH="${CUDA_HOME:+$CUDA_HOME/bin:}$PATH:/usr/local/cuda/bin" nvcc -std=c++17 -O3 -Icsrc \
    -gencode "arch=compute_$2,code=sm_$2" simulators/ptx_machine/programs/probe.cu -o "$folder/probe" &&
    "$1" simulators/ptx_machine/probe.py "$folder/probe" "$folder/golden" && tar -cf "$3" -C "$folder/golden" .
}

# shellcheck disable=SC2329  # likewise
ask_hopper() { # ask_hopper ARCHITECTURE: compares each number of products and of copied boxes with the host's
  [ "$1" = 90a ] || { echo "not asked: this is a GPU for sm_$1"; return; }
  folder=$(mktemp -d) || return
  trap 'rm -rf "$folder"' EXIT
  PATH="${CUDA_HOME:+$CUDA_HOME/bin:}$PATH:/usr/local/cuda/bin" nvcc -std=c++17 -O3 -Icsrc \
    -gencode "arch=compute_$1,code=sm_$1" simulators/ptx_machine/programs/hopper.cu -o "$folder/hopper" || return
  for test in products boxes; do "$folder/hopper" "$test" || echo "$test: failed"; done >"$folder/differences"
  cat "$folder/differences"
  [ -s "$folder/differences" ] && ! grep -v ': 0$' "$folder/differences"
}

run() { # run NAME COMMAND...: runs a step within its time limit, and adds its line to the summary
  local name=$1 start=$SECONDS code line
  shift
  printf '\n=== %s: %s\n' "$name" "$*"
  timeout --kill-after=20 "$limit" "$@"
  code=$?
  case $code in
    0) line="passed" ;;
    124 | 137) line="FAILED: stopped after $limit s" ;;
    *) line="FAILED with $code" ;;
  esac
  summary+=("$(printf '%-7s %s (%d s)' "$name" "$line" $((SECONDS - start)))")
}

tests() { # tests NAME VARIABLE=VALUE... [-- ARGUMENT...]: runs pytest, in several processes if xdist is installed
  local name=$1 variables=(PYTHONUNBUFFERED=1) parallel=()
  shift
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    variables+=("$1")
    shift
  done
  "$python" -c 'import xdist' 2>/dev/null && parallel=(--numprocesses logical --maxprocesses 8 --dist loadgroup)
  run "$name" env "${variables[@]}" "$python" -m pytest -q -p no:cacheprovider \
    ${parallel[@]+"${parallel[@]}"} "${@:2}"
}

perform() { # perform STEP
  case $1 in
    build) # for the GPU that torch sees, unless TORCH_CUDA_ARCH_LIST says otherwise
      run build env SELFATTN_CUDA=1 "$python" setup.py --quiet build_ext --inplace
      ;;
    hopper)
      export -f ask_hopper
      run hopper bash -c 'ask_hopper "$@"' hopper "$(architecture)"
      ;;
    test)
      # They run in one process, because some need most of the GPU's memory and measure how much of it is taken.
      run test env SELFATTN_REQUIRE_CUDA=1 PYTHONUNBUFFERED=1 "$python" -m pytest -q -p no:cacheprovider \
        "${gpu_tests[@]}"
      ;;
    device)
      tests device SELFATTN_TEST_DEVICE=cuda SELFATTN_REQUIRE_CUDA=1 -- "${elsewhere[@]}"
      ;;
    suite)
      tests suite -- "${gpu_tests[@]/#/--ignore=}" --ignore=tests/cuda/test_on_cuda.py "${elsewhere[@]}"
      ;;
    check)
      run check "$python" scripts/cuda_compile_check.py --archs "$(architecture)"
      ;;
    golden)
      export -f record_golden
      run golden bash -c 'record_golden "$@"' golden "$python" "$(architecture)" "$out/golden.tar"
      ;;
    bench)
      run bench env PYTHONUNBUFFERED=1 "$python" benchmarks/gpu_run.py ${quick[@]+"${quick[@]}"} \
        --json "$out/bench.json" --markdown "$out/bench.md"
      ;;
  esac
}

while [ $# -gt 0 ]; do
  case $1 in
    --build | --hopper | --test | --device | --suite | --check | --golden | --bench | --all) steps+=("${1#--}") ;;
    --quick) quick=(--quick) ;;
    -h | --help) usage; exit 0 ;;
    *) echo "gpu_check.sh: unknown argument $1; --help lists the steps" >&2; exit 2 ;;
  esac
  shift
done
[ ${#steps[@]} -gt 0 ] || { usage >&2; exit 2; }

mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
all_steps() {
  date -u +'%Y-%m-%d %H:%M UTC'
  for step in $(wanted); do perform "$step"; done
  printf '\n=== summary (results in %s)\n' "$out"
  printf '%s\n' "${summary[@]}"
  [[ "${summary[*]}" != *FAILED* ]]
}
all_steps 2>&1 | tee -a "$out/log.txt"
exit "${PIPESTATUS[0]}"
