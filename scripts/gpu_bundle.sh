#!/usr/bin/env bash
# Prepares, on a machine with everything installed, a folder for a GPU machine without network: what scripts/gpu_check.sh needs
# beside the repository, nvcc and g++. Headers, an Open MPI that runs from any place, OpenBLAS, the cpu target's losses.
#
#   scripts/gpu_bundle.sh [DIR]        DIR: build/gpu_bundle, where gpu_check looks; MAX_MB=64 is the most it may hold
#
# Both machines must have one processor architecture, and the GPU machine a C library as new as this one's.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/mpi_env.sh
dir=${1:-build/gpu_bundle}
max_mb=${MAX_MB:-64}
fail() { echo "gpu_bundle: $*" >&2; exit 1; }

scripts/install_deps.sh
make -s TARGET=cpu build/cpu/train_gpt
config() { sed -n "s/^$1 := //p" build/config.mk; }
place() { ompi_info --parseable --path "$1" | sed -n "s/^path:$1://p"; }
command -v ompi_info > /dev/null || fail "no ompi_info: the bundle's MPI is Open MPI 4 (apt: openmpi-bin libopenmpi-dev)"
blas=$(config BLAS_LIBS | grep -o -- '-L[^ ]*' | cut -c3-)/libopenblas.so
[ -e "$blas" ] || fail "no libopenblas.so by build/config.mk's BLAS_LIBS := $(config BLAS_LIBS) (apt: libopenblas-openmp-dev)"
cblas=$(config BLAS_CFLAGS | sed 's/^-I//')

rm -rf "$dir"
mkdir -p "$dir"/{bin,lib/openmpi3,lib/pmix,share/openmpi,etc,include/openblas,include/openmpi}
dir=$(cd "$dir" && pwd)
header_find() { echo "#include <$1>" | g++ -M -x c++ - | tr ' ' '\n' | grep -m 1 "/$1\$"; }
copy_header_of() { cp -rL "$(dirname "$(header_find "$1")")" "$dir/include/"; }
copy_header_of nlohmann/json.hpp
copy_header_of CLI/CLI.hpp
copy_header_of doctest/doctest.h
cp -L "$(place incdir)"/{mpi.h,mpi_portable_platform.h} "$dir/include/openmpi/"
cp -L "$cblas"/{cblas.h,openblas_config.h} "$dir/include/openblas/"

# Open MPI for the ranks of one host: without other networks and launchers, OpenSHMEM, MPI-IO
cp -L "$(command -v mpirun)" "$dir/bin/orterun"
cp -L "$(place libdir)/libmpi.so" "$dir/lib/libmpi.so.40"
unwanted='ucx|ofi|psm|openib|slurm|flux|jsm|gridengine|simulator|monitoring|romio|ompio'
unwanted+='|^mca_(fs|fcoll|fbtl|sharedfp|memheap|scoll|spml|sshmem|atomic|crs|io|vprotocol|osc)_'
for module in "$(place pkglibdir)"/mca_*.so; do
    [[ $(basename "$module") =~ $unwanted ]] || cp -L "$module" "$dir/lib/openmpi3/"
done
cp "$(place pkgdatadir)"/*.txt "$dir/share/openmpi/"
touch "$dir/etc/openmpi-mca-params.conf"
cp -L "$blas" "$dir/lib/libopenblas.so.0"
# what all these need, except what comes with any C library and compiler
ldd "$dir"/bin/orterun "$dir"/lib/*.so.* "$dir"/lib/openmpi3/*.so | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
    grep -Ev '/(ld-linux|libc\.so|libm\.so|libdl|libpthread|librt|libutil|libgcc_s|libstdc\+\+|libgomp)' |
    while read -r library; do [ -e "$dir/lib/$(basename "$library")" ] || cp -L "$library" "$dir/lib/"; done
pmix=$(dirname "$(readlink -f "$(ldd "$dir"/lib/openmpi3/mca_pmix_ext*.so | awk '/libpmix/ { print $3 }')")")
cp -L "$pmix"/pmix/*.so "$dir/lib/pmix/" 2> /dev/null || true  # where PMIx has modules of its own

# For the linker. A program names all of them itself and finds them by its own path (old dtags: which then also serves what MPI
# opens), since Open MPI's libraries look for each other where they were installed.
cd "$dir/lib"
echo "INPUT(libopenblas.so.0 $(ls | grep -E '^lib(gfortran|quadmath)' | xargs))" > libopenblas.so
echo "INPUT($(ls | grep -E '^lib.*\.so\.' | grep -Ev '^lib(openblas|gfortran|quadmath|mca)' | xargs))" > libmpi.so
cd - > /dev/null
cat > "$dir/bin/mpicc" <<'E2'
#!/bin/sh
# Says how to build with this folder's MPI.
here=$(dirname "$(dirname "$(readlink -f "$0")")")
case "$1" in
    --showme:compile) echo "-I$here/include/openmpi" ;;
    --showme:link) echo "-L$here/lib -Wl,--disable-new-dtags -Wl,-rpath,$here/lib -Wl,--no-as-needed -lmpi" ;;
    *) echo "mpicc: only --showme:compile and --showme:link" >&2; exit 1 ;;
esac
E2
cat > "$dir/bin/mpirun" <<'E2'
#!/bin/sh
# This folder's mpirun; scripts/gpu_check.py sets OPAL_PREFIX and the like.
here=$(dirname "$(dirname "$(readlink -f "$0")")")
LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec "$here/bin/orterun" "$@"
E2
chmod +x "$dir"/bin/*

bytes=$(du -sb "$dir" | cut -f1)
[ "$bytes" -le $((max_mb << 20)) ] || fail "'$dir' has $((bytes >> 20)) MB, at most $max_mb may be brought. The biggest files:" \
    "$(cd "$dir" && find . -type f -printf '%s %P\n' | sort -rn | head -3 | awk '{ printf "%s (%.1f MB) ", $2, $1 / 1048576 }')"
python3 scripts/gpu_check.py --reference "$dir/reference.json"
echo "$dir: $((bytes >> 20)) MB. Bring it with the repository; on the GPU machine: scripts/gpu_check.sh --bundle DIR"
