#!/usr/bin/env bash
# Installs what the build needs and this machine lacks, with apt; --test also gets the oracle that tests compare with
# (PyTorch, and transformers in a virtual environment of its own, build/venv). Quick where nothing is missing.
#
# What is there is found by probes: apt is asked only for what did not compile, link or import. As another user than
# root it prints the one command to run and fails.
set -u
cd "$(dirname "$0")/.."
python=/usr/bin/python3
test=
case "${1:-}" in "") ;; --test) test=1 ;; *) echo "usage: scripts/install_deps.sh [--test]" >&2; exit 2 ;; esac

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
builds() { echo "$1 int main() { $2 }" > "$tmp/a.cpp" && g++ "$tmp/a.cpp" -o "$tmp/a" "${@:3}" > /dev/null 2>&1; }
has_header() { echo "#include <$1>" | g++ -std=c++20 -E -x c++ - -o /dev/null 2> /dev/null; }
imports() { "$python" -c "import $1" > /dev/null 2>&1; }
shopt -s nullglob
first_of() { echo "${1:-}"; }

missing_packages() {
    command -v g++ > /dev/null || echo g++
    command -v make > /dev/null || echo make
    command -v mpirun > /dev/null || echo openmpi-bin
    builds $'#include <mpi.h>\n' 'MPI_Finalize();' -DOMPI_SKIP_MPICXX=1 \
        $(mpicc --showme:compile 2> /dev/null) $(mpicc --showme:link 2> /dev/null) || echo libopenmpi-dev
    has_header nlohmann/json.hpp || echo nlohmann-json3-dev
    has_header CLI/CLI.hpp || echo libcli11-dev
    has_header doctest/doctest.h || echo doctest-dev
    local blas
    blas=$(first_of /usr/lib/*/openblas-openmp/libopenblas.so /usr/lib*/openblas-openmp/libopenblas.so)
    builds 'extern "C" int openblas_get_parallel();' 'return openblas_get_parallel() != 2;' ${blas:-"-lopenblas"} \
        && { [ -n "$blas" ] || "$tmp/a"; } || echo libopenblas-openmp-dev
    imports matplotlib || echo python3-matplotlib
    [ -n "$test" ] || return 0
    imports numpy || echo python3-numpy
    imports torch || echo python3-torch
    # PyTorch does its matrix products with the system's libblas: OpenBLAS with threads of its own, 17 times the reference.
    [ -n "$(first_of /usr/lib/*/openblas-pthread/libblas.so.3)" ] || echo libopenblas0-pthread
    imports ensurepip || echo python3-venv
}

packages=$(missing_packages)
if [ -n "$packages" ]; then
    install="apt-get -o DPkg::Lock::Timeout=600 install -y --no-install-recommends "$(echo $packages)
    if ! command -v apt-get > /dev/null; then
        echo "install_deps: this system has no apt-get; install what these Debian packages hold: "$packages >&2
        exit 1
    fi
    if [ "$(id -u)" != 0 ]; then
        echo "install_deps: missing:" $packages >&2
        echo "run this, then start again:" >&2
        echo "    sudo sh -c 'apt-get update && $install'" >&2
        exit 1
    fi
    echo "installing:" $packages
    export DEBIAN_FRONTEND=noninteractive
    mkdir -p build
    # The list of packages may be absent or out of date: then it is fetched and the install is tried again.
    $install > build/apt.log 2>&1 || { apt-get -o DPkg::Lock::Timeout=600 update > build/apt.log 2>&1 && $install >> build/apt.log 2>&1; } || {
        tail -n 5 build/apt.log >&2
        echo "install_deps: apt could not install" $packages "(all it said: build/apt.log)" >&2
        exit 1
    }
    still=$(missing_packages)
    [ -z "$still" ] || { echo "install_deps: installed, and still not usable:" $still >&2; exit 1; }
    rm -f build/config.mk  # the next make looks again
fi

# The transformers that work beside Debian 12's PyTorch 1.13. Without a network the tests that need them are skipped.
if [ -n "$test" ] && ! build/venv/bin/python -c "import transformers, safetensors, ml_dtypes" > /dev/null 2>&1; then
    echo "setting up build/venv for the oracle tests"
    mkdir -p build
    { "$python" -m venv --system-site-packages build/venv &&
        build/venv/bin/python -m pip install -q 'transformers>=4.36,<4.46' safetensors 'numpy<2' tokenizers ml_dtypes; } > build/venv.log 2>&1 ||
        echo "install_deps: no build/venv (build/venv.log says why): the tests against transformers will be skipped" >&2
fi
exit 0
