// The boundaries (mpi_boundary.cpp) on the emulator: CUDA's codecs, NCCL and the host's staging, in every order of streams.
#include "mpi_boundary.cpp"
