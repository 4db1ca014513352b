#!/usr/bin/env bash
# Finds what the build can use, each by compiling and linking a probe, and writes the answers to build/config.mk.
# Prints a line for each: found and which version, or what is missing and how to get it. `make config` runs it again.
#
# To steer it: CXX, MPICC, CUDA_HOME in the environment; BLAS_CFLAGS and BLAS_LIBS for a BLAS with a cblas interface.
set -u
cd "$(dirname "$0")/.."
mkdir -p build
out=build/config.mk.new
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
: > $out

say() { printf '  %-14s %s\n' "$1" "$2"; }
set_var() { printf '%s := %s\n' "$1" "$2" >> $out; }
# probe FLAGS: compiles and runs the program on stdin; its output is the probe's
probe() { cat > "$tmp/probe.cpp"; $CXX -std=c++20 -x c++ "$tmp/probe.cpp" -x none -o "$tmp/probe" "$@" 2> "$tmp/errors" && "$tmp/probe"; }

CXX=${CXX:-g++}
if found=$(probe -fopenmp <<< $'#include <cstdio>\nint main() { std::puts(__VERSION__); }'); then
    say compiler "$CXX $found"
    set_var CXX "$CXX"
    set_var CXX_VERSION "$found"
else
    say compiler "MISSING: $CXX cannot build a C++20 program with OpenMP. Install g++ 11 or later (apt: g++), or set CXX"
    exit 1
fi

MPICC=${MPICC:-mpicc}
libs=
if flags=$($MPICC --showme:compile 2> /dev/null) && libs=$($MPICC --showme:link 2> /dev/null); then :
elif flags=$($MPICC -show 2> /dev/null); then  # MPICH: the whole command, whose first word is the C compiler
    flags=${flags#* } libs=$flags
fi
if found=$(probe -DOMPI_SKIP_MPICXX=1 $flags $libs 2> /dev/null <<'CODE'
#include <mpi.h>
#include <cstdio>
#include <cstring>
int main() {
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length;
    MPI_Get_library_version(version, &length);
    std::printf("%.*s\n", int(std::strcspn(version, ",\n")), version);
}
CODE
); then
    say MPI "$found"
    set_var MPI_CFLAGS "$flags"
    set_var MPI_LIBS "$libs"
    set_var HAVE_MPI 1
else
    say MPI "missing: only a single-rank program is built. Get it with scripts/install_deps.sh (apt: openmpi-bin libopenmpi-dev)"
fi

# OpenBLAS with OpenMP threads comes first: another BLAS brings a second thread pool, and the two fight for the cores.
blas_probe() {
    probe "$@" <<'CODE'
#include <cblas.h>
#include <cstdio>
int main() {
    float a[4] = {1, 2, 3, 4}, c[4] = {};
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 2, 2, 2, 1.0f, a, 2, a, 2, 0.0f, c, 2);
    if (c[0] != 7 || c[3] != 22) return 1;
#ifdef OPENBLAS_VERSION
    const char* threads[] = {"one thread", "its own threads", "OpenMP threads"};
    std::printf("%s, %s\n", openblas_get_config(), threads[openblas_get_parallel()]);
#else
    std::puts("a cblas of unknown make");
#endif
}
CODE
}
blas_found=
try_blas() {  # CFLAGS LIBS: keeps the first that works, and prefers OpenMP threads over what it has
    local found
    found=$(blas_probe $1 $2) || return 0
    case "$blas_found:$found" in :* | *"OpenMP threads:"*) ;; *:*"OpenMP threads") ;; *) return 0 ;; esac
    case "$blas_found" in *"OpenMP threads") return 0 ;; esac
    blas_found=$found blas_cflags=$1 blas_libs=$2
}
if [ -n "${BLAS_LIBS:-}" ]; then
    try_blas "${BLAS_CFLAGS:-}" "$BLAS_LIBS"
else
    for library in /usr/lib/*/openblas-openmp/libopenblas.so /usr/lib*/openblas-openmp/libopenblas.so; do
        [ -e "$library" ] || continue
        directory=$(dirname "$library")
        headers=${directory/\/lib\///include/}
        try_blas "-I$headers" "-L$directory -Wl,-rpath,$directory -lopenblas"
    done
    try_blas "" "-lopenblasp"
    try_blas "" "-lopenblas"
    try_blas "-I/usr/include/openblas" "-lopenblas"
    for directory in /opt/homebrew/opt/openblas /usr/local/opt/openblas /usr/local; do
        try_blas "-I$directory/include" "-L$directory/lib -Wl,-rpath,$directory/lib -lopenblas"
    done
    try_blas "" "-lcblas"
    try_blas "" "-lblas"
fi
if [ -n "$blas_found" ]; then
    say BLAS "$blas_found"
    set_var BLAS_CFLAGS "$blas_cflags"
    set_var BLAS_LIBS "$blas_libs"
else
    say BLAS "MISSING: no cblas to link. Get it with scripts/install_deps.sh (apt: libopenblas-openmp-dev), or set BLAS_LIBS"
fi

header() {  # NAME HEADER PACKAGE NEEDED-FOR EXPRESSION-OF-VERSION [FLAG]
    local found
    if found=$(probe ${6:-} <<< "#include <cstdio>
#include <$2>
#define TEXT2(...) #__VA_ARGS__
#define TEXT(...) TEXT2(__VA_ARGS__)
int main() { std::puts($5); }"); then
        say "$1" "$found"
        return 0
    fi
    say "$1" "MISSING, needed for $4. Get it with scripts/install_deps.sh (apt: $3)"
    return 1
}
missing=
header nlohmann/json nlohmann/json.hpp nlohmann-json3-dev "every build" \
    'TEXT(NLOHMANN_JSON_VERSION_MAJOR) "." TEXT(NLOHMANN_JSON_VERSION_MINOR)' || missing="$missing nlohmann/json"
header CLI11 CLI/CLI.hpp libcli11-dev "every build" CLI11_VERSION || missing="$missing CLI11"
header doctest doctest/doctest.h doctest-dev "the tests" DOCTEST_VERSION_STR -DDOCTEST_CONFIG_DISABLE && set_var HAVE_DOCTEST 1
[ -n "$blas_found" ] || missing="$missing BLAS"
set_var MISSING "$missing"

# CUDA: a machine without a GPU can build for one; cudaGetDeviceCount then returns an error and leaves its argument alone.
gpus=0
for nvcc in "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" "$(command -v nvcc)" /usr/local/cuda/bin/nvcc; do
    [ -n "$nvcc" ] && [ -x "$nvcc" ] || continue
    cat > "$tmp/probe.cu" <<'CODE'
#include <cstdio>
int main() {
    int gpus = 0, version = 0;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess) gpus = 0;
    cudaRuntimeGetVersion(&version);
    std::printf("%d %d.%d\n", gpus, version / 1000, version % 1000 / 10);
}
CODE
    "$nvcc" -o "$tmp/cuda" "$tmp/probe.cu" 2> "$tmp/errors" && found=$("$tmp/cuda") || continue
    gpus=${found%% *}
    say CUDA "${found#* }, $nvcc, $gpus GPU(s)"
    set_var NVCC "$nvcc"
    cat > "$tmp/nccl.cu" <<'CODE'
#include <nccl.h>
#include <cstdio>
int main() {
    int version = 0;
    ncclGetVersion(&version);
    std::printf("%d.%d.%d\n", version / 10000, version % 10000 / 100, version % 100);
}
CODE
    if "$nvcc" -o "$tmp/nccl" "$tmp/nccl.cu" -lnccl 2> "$tmp/errors" && found=$("$tmp/nccl"); then
        say NCCL "$found"
        set_var HAVE_NCCL 1
    else
        say NCCL "missing (NVIDIA's repository: libnccl-dev)"
    fi
    break
done
grep -q '^NVCC' $out || say CUDA "missing, not needed on a CPU (get the toolkit from NVIDIA, then set CUDA_HOME)"
set_var GPUS "$gpus"
mv $out build/config.mk
