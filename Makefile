# Builds the trainer, its tests and benchmarks. `make help` lists what there is.
#
#   TARGET=cpu|cuda|emu       default: cuda where a GPU is found, else cpu; emu runs the CUDA code on a CPU (dev/emu)
#   PRECISION=bf16|fp32|fp16  storage of weights and activations on cuda and emu -> build/cuda-fp32/
#   CUDA_ARCHS="80 90 .."     GPUs to build for, as in sm_90
#   NO_MPI=1                  one rank, no MPI needed           -> build/cpu-nompi/
#   SANITIZE=asan|tsan        Address- and UBSanitizer, or ThreadSanitizer -> build/cpu-asan/
#   ARCH=native               -march of the cpu code            JOBS=N   compilers at a time
ARCH ?= native
PRECISION ?= bf16
CUDA_ARCHS ?= 80 90 100 120
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PYTHON ?= /usr/bin/python3
.DEFAULT_GOAL := all

# What scripts/configure.sh found on this machine; made on first use. Goals that may change it run a second make.
ifneq ($(filter-out help clean config deps test quickstart,$(or $(MAKECMDGOALS),all)),)
include build/config.mk
endif
build/config.mk: scripts/configure.sh
	@scripts/configure.sh

TARGET ?= $(if $(filter-out 0,$(GPUS)),cuda,cpu)
one_of = $(if $(filter $(2),$($(1))),,$(error $(1)=$($(1)): expected one of: $(2)))
$(call one_of,TARGET,cpu cuda emu)
$(call one_of,PRECISION,bf16 fp32 fp16)
$(if $(SANITIZE),$(call one_of,SANITIZE,asan tsan))
ifneq ($(and $(CXX_VERSION),$(filter tests,$(MAKECMDGOALS))),)
MISSING += $(if $(HAVE_DOCTEST),,doctest)
endif
ifeq ($(TARGET),cuda)
MISSING += $(if $(CXX_VERSION),$(if $(NVCC),,nvcc))
endif
ifneq ($(strip $(MISSING)),)
$(error missing: $(strip $(MISSING)). Run scripts/install_deps.sh, then make config; nvcc comes with NVIDIA's CUDA toolkit)
endif

# No contraction and no fast-math: encoded bytes must be the same on every target. nvcc hands these to its host compiler.
HOST_FLAGS := -fopenmp -march=$(ARCH) -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra -Wno-psabi
FLAGS := -I. $(BLAS_CFLAGS)
LIBS  := $(BLAS_LIBS)
ifeq ($(HAVE_MPI),)
NO_MPI := 1
endif
ifneq ($(NO_MPI),)
FLAGS += -DLLMC_NO_MPI
else
FLAGS += -DOMPI_SKIP_MPICXX=1 $(MPI_CFLAGS)
LIBS  += $(MPI_LIBS)
endif
ifneq ($(TARGET),cpu)
FLAGS += -DLLMC_CUDA $(if $(filter-out bf16,$(PRECISION)),-DFLOATX_$(if $(filter fp32,$(PRECISION)),FP32,FP16))
endif
comma := ,
empty :=
space := $(empty) $(empty)
ifeq ($(TARGET),cuda)
# machine code for each, and PTX of the newest for what comes after it
FLAGS += -std=c++20 -O3 --expt-relaxed-constexpr -Xcudafe --diag_suppress=1675 -Xcompiler $(subst $(space),$(comma),$(HOST_FLAGS)) \
         $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$a$(comma)code=sm_$a) \
         -gencode arch=compute_$(lastword $(CUDA_ARCHS))$(comma)code=compute_$(lastword $(CUDA_ARCHS)) --threads $(JOBS)
LIBS  := $(subst $(comma), -Xlinker ,$(patsubst -Wl$(comma)%,-Xlinker %,$(LIBS))) -lcublasLt
ifeq ($(HAVE_NCCL),)
FLAGS += -DLLMC_NO_NCCL
else
LIBS  += -lnccl
endif
COMPILER = $(NVCC) -x cu
else
FLAGS += -std=c++20 $(HOST_FLAGS) -Werror
ifeq ($(TARGET),emu)
FLAGS += -DCUDA_EMU -Idev/emu -fno-strict-aliasing -Wno-unknown-pragmas  # g++ has no #pragma unroll
endif
asan := -g1 -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -Wno-maybe-uninitialized
tsan := -g1 -O1 -fsanitize=thread -Wno-maybe-uninitialized -Wno-tsan
FLAGS += $(if $(SANITIZE),$($(SANITIZE)),$(if $(filter emu,$(TARGET)),-O2,-O3))
COMPILER = $(CXX) -x c++
endif
B := build/$(TARGET)$(if $(filter-out cpu,$(TARGET)),$(if $(filter-out bf16,$(PRECISION)),-$(PRECISION)))$(if $(NO_MPI),-nompi)$(if $(SANITIZE),-$(SANITIZE))

# emu_*.cu run on several ranks of the emulator, as mpi_*.cpp do on the cpu target
TEST_SOURCES_cpu  := $(wildcard test/test_*.cpp) $(if $(NO_MPI),,$(wildcard test/mpi_*.cpp))
TEST_SOURCES_cuda := test/test_kernels.cu
TEST_SOURCES_emu  := $(wildcard test/test_*.cu) $(if $(NO_MPI),,$(wildcard test/emu_*.cu))
TESTS := $(addprefix $B/test/,$(basename $(notdir $(TEST_SOURCES_$(TARGET)))))
DEV_SOURCES := $(wildcard $(if $(filter cpu,$(TARGET)),dev/cpu/*.cpp dev/codec/*.cpp,dev/cuda/*.cu))
DEV   := $(addprefix $B/dev/,$(basename $(notdir $(DEV_SOURCES))))

.PHONY: all tests dev test test-emu-teeth ptxas quickstart bench bench-codec config deps clean help FORCE
.DELETE_ON_ERROR:

all: $B/train_gpt  ## the trainer; ./train_gpt is the one that fits this machine (the default)
	$(if $(SANITIZE)$(filter emu,$(TARGET)),,@ln -sf $< train_gpt)
	$(if $(HAVE_MPI),,@echo "MPI was not found: ./train_gpt runs on one rank (scripts/install_deps.sh gets MPI)")

tests: $(TESTS)  ## builds the tests without running them

dev: $(DEV)  ## builds the benchmarks of dev/

test:  ## installs what is missing, builds and runs all tests; ends with "N passed, N failed"
	@scripts/install_deps.sh --test
	-@$(MAKE) --no-print-directory -k -j$(JOBS) test-emu-asan test-emu-fp32-asan test-cuda test-emu test-emu-tsan test-emu-fp32 \
	    test-cpu-asan test-cpu test-cpu-nompi
	@$(PYTHON) test/run.py

# Everything that the tests run, one make for each build, those of the longest compilations first; they share the jobs.
.PHONY: test-cpu test-cpu-asan test-cpu-nompi test-emu test-emu-fp32 test-emu-fp32-asan test-emu-asan test-emu-tsan test-cuda
test-cpu:           ; @+$(MAKE) --no-print-directory -k TARGET=cpu all dev tests
test-cpu-asan:      ; @+$(MAKE) --no-print-directory -k TARGET=cpu SANITIZE=asan tests
test-cpu-nompi:     ; @+$(MAKE) --no-print-directory -k TARGET=cpu NO_MPI=1 build/cpu-nompi/train_gpt
test-emu:           ; @+$(MAKE) --no-print-directory -k TARGET=emu build/emu/train_gpt tests dev
test-emu-fp32:      ; @+$(MAKE) --no-print-directory -k TARGET=emu PRECISION=fp32 build/emu-fp32/train_gpt
test-emu-fp32-asan: ; @+$(MAKE) --no-print-directory -k TARGET=emu PRECISION=fp32 SANITIZE=asan build/emu-fp32-asan/train_gpt
test-emu-asan:      ; @+$(MAKE) --no-print-directory -k TARGET=emu SANITIZE=asan tests
test-emu-tsan:      ; @+$(MAKE) --no-print-directory -k TARGET=emu SANITIZE=tsan $(patsubst test/%.cu,build/emu-tsan/test/%,$(wildcard test/test_*.cu))
test-cuda:          ; @+$(if $(NVCC),$(MAKE) --no-print-directory -k TARGET=cuda build/cuda/train_gpt,echo "no nvcc: the CUDA target is not built")

test-emu-teeth:  ## plants faults in the CUDA code, one at a time, and shows that the tests see them; needs what `make test` built
	@$(PYTHON) test/teeth.py

ptxas:  ## registers, shared memory, spills and occupancy of each kernel, as in dev/results/ptxas.md
	@$(PYTHON) scripts/ptxas_table.py --nvcc $(NVCC)

quickstart:  ## trains a GPT on real text, two ranks, TACO on the wire; 6 minutes on 2 cores, everything included
	@scripts/quickstart.sh

bench: all dev  ## speed of a training step against sgemm and PyTorch, two models
	@scripts/bench_cpu.sh

bench-codec: $B/dev/bench_codec  ## GB/s of each codec on one core, against memcpy
	@OMP_NUM_THREADS=1 $<

config:  ## looks again for compilers and libraries and says what was found
	@scripts/configure.sh

deps:  ## installs what is missing (apt)
	@scripts/install_deps.sh

clean:  ## removes what was built
	rm -rf build train_gpt

help:  ## this list
	@sed -n '2,10s/^# \{0,1\}//p' Makefile
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

# Rebuilds everything when a flag, the compiler or a found library changes.
$B/flags: FORCE
	@mkdir -p $B/test $B/dev
	@echo '$(COMPILER) $(FLAGS) $(LIBS)' | cmp -s - $@ || echo '$(COMPILER) $(FLAGS) $(LIBS)' > $@

COMPILE = $(COMPILER) $(FLAGS) $(DEFINES) -MMD -MP -MF $@.d $< $(if $(filter cuda,$(TARGET)),,-x none) -o $@ $(LIBS)
$B/train_gpt: train_gpt.cu $B/flags
	$(COMPILE)
$B/test/%: test/%.cu $B/flags
	$(COMPILE)
$B/test/%: DEFINES = -DPROJECT_ROOT='"$(CURDIR)"'
$B/test/%: test/%.cpp $B/flags
	$(COMPILE)
# one area of test_kernels alone, to build them side by side: kernels_norm is test/kernels/test_norm.cuh
$B/test/kernels_%: DEFINES = -DPROJECT_ROOT='"$(CURDIR)"' -DKERNEL_AREA='"kernels/test_$*.cuh"'
$B/test/kernels_%: test/test_kernels.cu $B/flags
	$(COMPILE)
$B/dev/%: dev/cpu/%.cpp $B/flags
	$(COMPILE)
$B/dev/%: dev/codec/%.cpp $B/flags
	$(COMPILE)
$B/dev/%: dev/cuda/%.cu $B/flags
	$(COMPILE)

-include $(wildcard $B/*.d $B/test/*.d $B/dev/*.d)
