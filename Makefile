# Builds the trainer, its tests and benchmarks. `make help` lists what there is.
#
#   TARGET=cpu|cuda|emu   default: cuda where a GPU is found and llmc/cuda/ exists, else cpu
#   NO_MPI=1              one rank, no MPI needed           -> build/cpu-nompi/
#   SANITIZE=1            AddressSanitizer and UBSan        -> build/cpu-asan/
#   ARCH=native           -march of the cpu code            JOBS=N   compilers at a time
ARCH ?= native
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PYTHON ?= /usr/bin/python3
.DEFAULT_GOAL := all

# What scripts/configure.sh found on this machine; made on first use. Goals that may change it run a second make.
ifneq ($(filter-out help clean config deps test quickstart,$(or $(MAKECMDGOALS),all)),)
include build/config.mk
endif
build/config.mk: scripts/configure.sh
	@scripts/configure.sh

TARGET ?= $(if $(and $(filter-out 0,$(GPUS)),$(wildcard llmc/cuda)),cuda,cpu)
ifeq ($(filter cpu cuda emu,$(TARGET)),)
$(error TARGET=$(TARGET): expected cpu, cuda or emu)
endif
ifneq ($(filter cuda emu,$(TARGET)),)
$(error TARGET=$(TARGET) comes in a later version; this one builds TARGET=cpu)
endif
ifneq ($(and $(CXX_VERSION),$(filter tests,$(MAKECMDGOALS))),)
MISSING += $(if $(HAVE_DOCTEST),,doctest)
endif
ifneq ($(strip $(MISSING)),)
$(error missing: $(MISSING). Run scripts/install_deps.sh, then make config)
endif

# No contraction and no fast-math: encoded bytes must be the same on every target.
FLAGS := -std=c++20 -fopenmp -march=$(ARCH) -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra -Werror -Wno-psabi \
         -I. $(BLAS_CFLAGS)
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
ifneq ($(SANITIZE),)
FLAGS += -g1 -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -Wno-maybe-uninitialized
else
FLAGS += -O3
endif
B := build/$(TARGET)$(if $(NO_MPI),-nompi)$(if $(SANITIZE),-asan)

TESTS := $(patsubst test/%.cpp,$B/test/%,$(wildcard test/test_*.cpp) $(if $(NO_MPI),,$(wildcard test/mpi_*.cpp)))
DEV   := $(addprefix $B/dev/,$(basename $(notdir $(wildcard dev/cpu/*.cpp dev/codec/*.cpp))))

.PHONY: all tests dev test quickstart bench bench-codec config deps clean help FORCE
.DELETE_ON_ERROR:

all: $B/train_gpt  ## the trainer; ./train_gpt is the one that fits this machine (the default)
	$(if $(SANITIZE),,@ln -sf $< train_gpt)
	$(if $(HAVE_MPI),,@echo "MPI was not found: ./train_gpt runs on one rank (scripts/install_deps.sh gets MPI)")

tests: $(TESTS)  ## builds the tests without running them

dev: $(DEV)  ## builds the benchmarks of dev/

test:  ## installs what is missing, builds and runs all tests; ends with "N passed, N failed"
	@scripts/install_deps.sh --test
	-@$(MAKE) --no-print-directory -k -j$(JOBS) all dev tests
	-@$(MAKE) --no-print-directory -k -j$(JOBS) tests SANITIZE=1
	-@$(MAKE) --no-print-directory NO_MPI=1 build/$(or $(TARGET),cpu)-nompi/train_gpt
	@$(PYTHON) test/run.py

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
	@sed -n '2,6s/^# \{0,1\}//p' Makefile
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

# Rebuilds everything when a flag, the compiler or a found library changes.
$B/flags: FORCE
	@mkdir -p $B/test $B/dev
	@echo '$(CXX) $(FLAGS) $(LIBS)' | cmp -s - $@ || echo '$(CXX) $(FLAGS) $(LIBS)' > $@

COMPILE = $(CXX) $(FLAGS) $(DEFINES) -MMD -MP -MF $@.d -x c++ $< -x none -o $@ $(LIBS)
$B/train_gpt: train_gpt.cu $B/flags
	$(COMPILE)
$B/test/%: DEFINES = -DPROJECT_ROOT='"$(CURDIR)"'
$B/test/%: test/%.cpp $B/flags
	$(COMPILE)
$B/dev/%: dev/cpu/%.cpp $B/flags
	$(COMPILE)
$B/dev/%: dev/codec/%.cpp $B/flags
	$(COMPILE)

-include $(wildcard $B/*.d $B/test/*.d $B/dev/*.d)
