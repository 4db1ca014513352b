// The process grid: world = dp x tp, tp innermost, so that a tp group sits on the fastest links.
#pragma once
#include "llmc/comm/comm.h"

struct Mesh {
    Comm world, tp, dp;
};

// Collective. Throws, on all ranks alike, if the layout does not fit the number of ranks.
inline Mesh mesh_make(int tp, int pp, double timeout_s) {
    Mesh mesh;
    mesh.world = comm_world();
    mesh.world.timeout_s = timeout_s;
    const int ranks = mesh.world.size, rank = mesh.world.rank;
    check(pp == 1, "--pp %d: pipelines come in a later version, use --pp 1", pp);
    check(tp >= 1, "--tp %d: expected at least 1", tp);
    check(ranks % tp == 0,
          "--tp %d does not divide the %d rank%s of this run: start a multiple of %d with mpirun -np, or choose another --tp", tp,
          ranks, ranks == 1 ? "" : "s", tp);
    mesh.tp = comm_split(mesh.world, rank / tp, "tp");
    mesh.dp = comm_split(mesh.world, rank % tp, "dp");
    return mesh;
}
