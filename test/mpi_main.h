// main() of the tests that run on several ranks: include it first, in test/mpi_NAME.cpp. Every rank runs the same test
// cases in the same order; rank 0 prints, the others only what failed; if a check fails anywhere, all ranks exit with 1.
#pragma once
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "llmc/comm/comm.h"

int main(int argc, char** argv) {
    comm_init(&argc, &argv);
    Comm world = comm_world();
    doctest::Context context;
    context.setOption("minimal", world.rank != 0);
    context.applyCommandLine(argc, argv);
    const int failed = context.run();
    const double any_failed = all_reduce_max(world, failed);
    comm_finalize();
    return any_failed > 0;
}
