// Tensors by NCCL, a GPU a rank. All calls put work on the link's communication stream and return.
#pragma once
#include <nccl.h>

#include <exception>

#include "llmc/comm/comm.h"
#include "llmc/device.h"

inline void nccl_check(ncclResult_t result, const char* call) {
    if (result == ncclSuccess) return;
    fail("%s failed: %s (%s). NCCL_DEBUG=WARN tells more; ranks that share a GPU need --comm mpi", call,
         ncclGetErrorString(result), ncclGetLastError(nullptr));
}

// Ends a communicator: quietly where all ranks do, at once where this one leaves because of an error.
struct NcclEnd {
    void operator()(ncclComm* comm) const {
        if (std::uncaught_exceptions() > 0) {
            ncclCommAbort(comm);
        } else {
            ncclCommDestroy(comm);
        }
    }
};
using NcclComm = std::unique_ptr<ncclComm, NcclEnd>;

// A communicator of the group's ranks, each with its current device. Collective.
inline NcclComm nccl_open(Comm& comm) {
    ncclUniqueId id{};
    if (comm.rank == 0) nccl_check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    broadcast(comm, &id, sizeof id, 0);
    ncclComm_t made = nullptr;
    nccl_check(ncclCommInitRank(&made, comm.size, id, comm.rank), "ncclCommInitRank");
    return NcclComm(made);
}

// What went wrong in the background, for instance because another rank died; empty: nothing. Callable from any thread.
inline std::string nccl_error(ncclComm_t comm) {
    ncclResult_t result = ncclSuccess;
    ncclCommGetAsyncError(comm, &result);
    if (result == ncclSuccess || result == ncclInProgress) return "";
    return format_text("NCCL reports: %s. NCCL_DEBUG=WARN tells more", ncclGetErrorString(result));
}

inline void nccl_all_gather(ncclComm_t nccl, const Comm& comm, char* slots, size_t bytes, Stream stream) {
    nccl_check(ncclAllGather(slots + comm.rank * bytes, slots, bytes, ncclUint8, nccl, stream.handle), "ncclAllGather");
}

inline void nccl_all_to_all(ncclComm_t nccl, const Comm& comm, char* receive, const char* send, size_t bytes, Stream stream) {
    nccl_check(ncclGroupStart(), "ncclGroupStart");
    for (int step = 1; step < comm.size; step++) {
        const int to = (comm.rank + step) % comm.size, from = (comm.rank + comm.size - step) % comm.size;
        nccl_check(ncclSend(send + to * bytes, bytes, ncclUint8, to, nccl, stream.handle), "ncclSend");
        nccl_check(ncclRecv(receive + from * bytes, bytes, ncclUint8, from, nccl, stream.handle), "ncclRecv");
    }
    nccl_check(ncclGroupEnd(), "ncclGroupEnd");
}

inline void nccl_all_reduce_sum(ncclComm_t nccl, float* x, size_t n, Stream stream) {
    nccl_check(ncclAllReduce(x, x, n, ncclFloat32, ncclSum, nccl, stream.handle), "ncclAllReduce");
}
